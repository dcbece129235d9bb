"""The work of all workers of an iterator, which is pickled once for all of them."""

from __future__ import annotations

from multiprocessing import context
from typing import Any

from ringloader._start import fallback
from ringloader._start.pickled import ForOne, Pickled, for_all
from ringloader._start.shared_reductions import NotForAllError


class Shared:
    """The work of all workers of an iterator, pickled when the first of them starts, until :meth:`close`.

    So what pickling raises is raised where torch's pickling would.

    Args:
        finds_main: True if the processes have the main module.
    """

    def __init__(self, finds_main: bool) -> None:
        self._finds_main = finds_main
        self._pickled: Pickled | None = None
        # True: what is still to start gets a pickle of its own.
        self._is_closed = False

    def pickled(self, work: Any) -> Pickled | ForOne:
        """Returns the work of all, pickled once from the first one, or what is pickled for each process."""
        if self._pickled is None and not self._is_closed and context.get_spawning_popen() is not None:
            try:
                self._pickled = for_all(work, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)
            except NotForAllError:
                self._is_closed = True
        return self._pickled or ForOne(work, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        if self._pickled is not None:
            self._pickled.close()
        self._pickled, self._is_closed = None, True


class SharedWork:
    """The work of one worker. Pickled, it is a reference to that of all, with the number of this worker."""

    def __init__(self, shared: Shared, work: Any) -> None:
        self._shared = shared
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_number, (self._shared.pickled(self._work), self._work.worker)


def _with_number(work: Any, worker: int) -> Any:
    """Returns the work of a worker, in the worker."""
    return work._replace(worker=worker)
