"""The stages that a batch passes between its source and the caller of ``next``, in their order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._options.collecting import Collecting
    from ringloader._placement.device import Moving
    from ringloader._report.tally import Clock
    from ringloader._stats.recording import Recording
    from ringloader._torch.protocols import TorchLoader

# Gives the next batch to the iterator that it is called with.
Take = Callable[[Any], Any]


class Stage(Protocol):
    """A stage between the source of an iterator's batches and its caller."""

    def around(self, take: Take) -> Take:
        """Returns ``take`` with this stage around it."""


class Stages(NamedTuple):
    """The stages of a loader's options.

    Attributes:
        moving: Moves batches to a device.
        collecting: Takes bad samples off batches, and lists them.
        transform: The ``device_transform`` of batches that stay on the CPU.
        recording: Measures how long ``next`` takes.
        clock: Measures that for a report at exit.
    """

    moving: Moving | None = None
    collecting: Collecting | None = None
    transform: Transform | None = None
    recording: Recording | None = None
    clock: Clock | None = None

    def chain(
        self,
        take: Take,
        next_epoch: Stage | None = None,
        dataset: Stage | None = None,
        gate: Stage | None = None,
    ) -> Take:
        """Returns ``take`` with all stages around it, the first one innermost.

        Args:
            take: The source: gives a batch where it is needed, on its device if it is moved.
            next_epoch: Begins the next epoch early, with ``prefetch_epochs``.
            dataset: Takes the snapshots of the dataset off batches, in a loader with states.
            gate: Stops at a limit or a pause.
        """
        for stage in (next_epoch, dataset, self.collecting, self.transform, self.recording, self.clock, gate):
            if stage is not None:
                take = stage.around(take)
        return take

    def moved(self, take: Take) -> Take:
        """Returns ``take`` for a source whose batches are moved in the call of ``next``."""
        return take if self.moving is None else functools.partial(_moved, self.moving, take)

    def begin_recording(self) -> None:
        """Begins the times of another epoch of the same iterator: the first step of ``iter``."""
        if self.recording is not None:
            self.recording.recorder.begin()
        if self.clock is not None:
            self.clock.begin()

    def begin_epoch(self, loader: TorchLoader) -> None:
        """Begins another epoch of the same iterator."""
        if self.moving is not None:
            self.moving.begin_epoch()
        if self.collecting is not None:
            self.collecting.begin_epoch(loader)

    def has_begun(self) -> None:
        """Notes the end of the ``iter`` of another epoch."""
        if self.clock is not None:
            self.clock.has_begun()

    @property
    def counters(self) -> Callable[[], dict[str, int]]:
        """Returns a function that counts moved batches for a report, and holds no reference to the loader."""
        return dict if self.moving is None else self.moving.counts


NO_STAGES = Stages()


def _moved(moving: Moving, take: Take, iterator: OurIterator) -> Any:
    return moving.place_next(functools.partial(take, iterator))


class Transform:
    """Calls ``device_transform`` with each batch.

    Args:
        function: The user's function.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def around(self, take: Take) -> Take:
        """Returns ``take`` for transformed batches."""
        return functools.partial(self._next, take)

    def _next(self, take: Take, iterator: OurIterator) -> Any:
        batch = take(iterator)
        try:
            return self._function(batch)
        except StopIteration as error:
            # To the caller that would be the end of the epoch.
            raise RuntimeError("device_transform raised StopIteration") from error
