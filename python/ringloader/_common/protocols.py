"""The attributes of ringloader's iterators that other modules read, as types: mypy refuses any other.

They are for annotations only. The modules that read them stand below the iterators' classes, which
they therefore cannot name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from ringloader._torch.protocols import TorchIterator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import ringloader._native as _native

    _SchedulerCallbacks = _native.SchedulerCallbacks
else:

    class _SchedulerCallbacks(Protocol):
        """Stands for the protocol of the stub, which the binary does not have."""


# The path of an iterator's batches, as a report names it.
PathName = Literal["native", "threads", "ray", "single-process", "torch"]


class Handle(Protocol):
    """A worker, as ``iterator._workers`` lists it: a process of ``multiprocessing``, a thread, an actor."""

    @property
    def pid(self) -> int | None:
        """The id of its process; None before it runs."""

    @property
    def exitcode(self) -> int | None:
        """None until it has ended, then the exit code of its process, or 0 for one that has left."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...


class OurIterator(TorchIterator, Protocol):
    """An iterator of ringloader's, on any path."""

    # A `Note`, which is above.
    _noted: Any
    # An `EpochPlan`, which is above.
    _plan: Any
    _features: Sequence[Any]

    @property
    def _batches_returned(self) -> int: ...

    def _seconds_waited(self) -> float | None: ...

    def is_paused(self) -> bool: ...


class OurWorkersIterator(OurIterator, _SchedulerCallbacks, Protocol):
    """An iterator of ringloader's that has workers."""

    _shutdown: bool
    _scheduler: _native.Scheduler | _native.ThreadScheduler
    # A `Transport` and the `Workers`, whose classes are above.
    _transport: Any
    _all_workers: Any

    def _work_of(self, worker: int, start: Any) -> Any: ...

    def _start_of(self, worker: int, tells: bool, plan: Any = None) -> Any: ...

    def _try_put_index(self) -> None: ...

    def _send_start(self) -> _native.IndexSource: ...

    def _take_committed(self) -> None: ...
