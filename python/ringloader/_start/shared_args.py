"""Arguments of all workers of an iterator, pickled once for all of them.

torch pickles the arguments of its worker loop for every worker that does not fork. Here the first worker's
are pickled into memory that the others read too. Arguments that differ are sent to each. What cannot be
treated so is pickled for each worker, as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import context
from typing import Any

from ringloader._start.main_module import Look
from ringloader._start.pickled import NotForAllError, Pickled, Sent

# Arguments of these types may differ from worker to worker: they refer to nothing that is shared.
_PLAIN = (int, str, type(None))


class Arguments:
    """The arguments of one worker's loop. Pickled, they are a reference to what was pickled once."""

    def __init__(self, shared: Shared, arguments: tuple[Any, ...]) -> None:
        self._shared = shared
        self._arguments = arguments

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self._shared.send(self._arguments)
        return (tuple, (self._arguments,)) if sent is None else (_load, sent)


class Shared:
    """The arguments that are the same for all workers of an iterator, in memory until :meth:`close`.

    They are pickled when the first worker starts, so what this raises is raised where torch's pickling would.

    Args:
        look: Looks through the pickle, and may raise; None if nothing need be looked for.
    """

    def __init__(self, look: Look | None = None) -> None:
        self._look = look
        self._first: tuple[Any, ...] | None = None
        self._for_each = False
        self._pickled: Pickled | None = None

    def send(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns what the process being started needs for its arguments, or None if they must be pickled."""
        if self._for_each or context.get_spawning_popen() is None:
            return None
        if self._first is None:
            try:
                self._pickled = Pickled((arguments,))
                if self._look is not None:
                    self._pickled.show(self._look.through)
            except NotForAllError:
                self.close()
                return None
            except BaseException:
                self.close()
                raise
            self._first = arguments
        own = self._differing(arguments)
        return None if own is None or self._pickled is None else (self._pickled, own)

    def _differing(self, arguments: tuple[Any, ...]) -> dict[int, Any] | None:
        """Returns by position what differs from the first worker's; None if that cannot be told, or sent."""
        first = self._first
        if first is None or len(first) != len(arguments):
            return None
        pairs = enumerate(zip(first, arguments, strict=True))
        own = {number: mine for number, (one, mine) in pairs if one is not mine}
        return own if all(type(value) in _PLAIN for value in own.values()) else None

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        if self._pickled is not None:
            self._pickled.close()
        self._first = self._pickled = None
        # A worker that still starts after this gets a pickle of its own.
        self._for_each = True


def _load(sent: Sent, own: dict[int, Any]) -> tuple[Any, ...]:
    """The arguments, in the worker."""
    (shared,) = sent.load()
    arguments = list(shared)
    for number, value in own.items():
        arguments[number] = value
    return tuple(arguments)
