"""torch's own iterator, where torch's loader runs whole, with the options that work there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ringloader._core import pausing
from ringloader._core.feature import Feature, chain, first
from ringloader._core.pausing import Pausing
from ringloader._torch import hook, internals

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


class TorchsIterator(Pausing):
    """Stands in front of an iterator that torch, or other code, has made.

    Args:
        iterator: The iterator. ``isinstance`` takes this object for one of its class.
        features: The features that are on.
    """

    def __init__(self, iterator: Any, features: Sequence[Feature] = ()) -> None:
        self._iterator = iterator
        self._features = features
        # Batches that `next` has returned: torch's iterator counts one before it is moved to a device.
        self._batches_returned = 0
        self._put_stages()

    def _chain(self, gate: Any) -> Callable[[Any], Any]:
        return chain(_next_of, self._features, gate)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._iterator)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            batch = self._take_next(self)
            # The last step: a signal handler may ask for the state at any time.
            self._batches_returned += 1
            return batch
        except BaseException as error:
            for feature in self._features:
                feature.raised(self, error)
            if isinstance(error, Exception):
                # An iterator of torch's finds the end of its workers, and takes it for a loss.
                pausing.raise_if_ended(self)
            raise

    def __del__(self) -> None:
        self._settle()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's has an error of its own.
        return self._iterator.__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def _reset(self, loader: TorchLoader, first_iter: bool = False) -> None:
        """Begins another epoch of persistent workers."""
        self._remove_gate()
        for feature in self._features:
            feature.begin_times()
        for feature in self._features:
            feature.begin_epoch(loader)
        if self._noted is not None:
            self._noted.end_epoch(self._batches_returned)
        self._batches_returned = 0
        given = loader, "it began the epoch before", hook.beneath(internals.Loader._get_iterator)
        if first(feature.torchs(*given, self._iterator) for feature in self._features) is None:
            self._iterator._reset(loader, first_iter)
        self._put_stages()
        for feature in self._features:
            feature.begun(loader, self)

    def _stop(self, message: str) -> None:
        """Makes torch's iterator raise an error with this message, also in a thread that waits in it.

        Such a thread asks again every few seconds. It would find no worker lost, since all were told to end,
        and wait for ever.
        """
        if hasattr(type(self._iterator), "_try_get_data"):
            ended = functools.partial(_raise_ended, message)
            vars(self._iterator).update(_try_get_data=ended, _process_data=ended)


def _raise_ended(message: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(message)


def _next_of(iterator: TorchsIterator) -> Any:
    return next(iterator._iterator)
