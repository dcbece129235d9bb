"""``limit``, ``pause`` and ``resume`` of an iterator, and its end by the program."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator

_ENDED = (
    "this iterator was ended by DataLoader.shutdown(), or by the end of the loader's with block: "
    "call iter() on the loader for another one"
)


class Pausing:
    """Methods of ringloader's iterators that torch's do not have.

    The gate is the last stage that a batch passes. An iterator without a limit has none.
    """

    # Gives the next batch to the iterator that it is called with, through all stages.
    _take_next: Callable[[Any], Any]
    _gate: _Gate | None = None
    # The `Note` of the iterator.
    _noted: Any = None

    def _seconds_waited(self) -> float | None:
        """Returns the seconds for which workers had no batch ready; None without workers of ours."""
        return None

    def _settle(self) -> None:
        """Notes for a report what this iterator has counted, before it goes."""
        if self._noted is not None:
            self._noted.settle(self)

    def _chain(self, gate: _Gate | None) -> Callable[[Any], Any]:
        """Returns the stages of this epoch, with a gate as the last one."""
        raise NotImplementedError

    def _put_stages(self) -> None:
        """Puts the stages of this epoch, and the gate, into ``_take_next``.

        INVARIANT: ``_take_next`` ends with ``_gate``, which a signal handler or thread may change meanwhile.
        """
        while True:
            gate = self._gate
            self._take_next = self._chain(gate)
            if self._gate is gate:
                return

    def limit(self, num_batches: int | None) -> None:
        """Makes ``next`` raise ``StopIteration`` after ``num_batches`` more batches, until :meth:`resume`.

        The limit holds after each :meth:`resume` again, for as many batches, until the end of the epoch. What
        workers have ready stays ready, and the sampler is read as without a limit.

        Args:
            num_batches: How many, from now; None for no limit. An iterator that is paused stays so.

        Raises:
            TypeError: If it is no int.
            ValueError: If it is not positive.
            RuntimeError: If the iterator was ended.
        """
        if num_batches is not None:
            if not isinstance(num_batches, int) or isinstance(num_batches, bool):
                raise TypeError(f"num_batches must be an int or None, not {num_batches!r}")
            if num_batches <= 0:
                raise ValueError(
                    f"num_batches must be positive, not {num_batches}: to stop now, call pause()"
                )
        gate = self._put_gate()
        was_paused = gate.is_closed()
        gate.limit = num_batches
        if not was_paused:
            self._open(gate)

    def pause(self) -> None:
        """Makes ``next`` raise ``StopIteration`` until :meth:`resume`. Workers get no new tasks meanwhile.

        What they were asked for before they still make, and it stays ready. A call of ``next`` that waits in
        another thread gets its batch.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        self._put_gate().close()

    def resume(self) -> None:
        """Continues where the iterator was paused, or stopped at its limit. The limit starts again from here.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        self._open(self._put_gate())

    def is_paused(self) -> bool:
        """True while ``next`` raises ``StopIteration`` because of :meth:`pause` or :meth:`limit`."""
        gate = self._gate
        return gate is not None and not gate.has_ended and gate.is_closed()

    def _put_gate(self) -> _Gate:
        """Returns the iterator's gate, which is put there if there is none."""
        gate = self._gate
        if gate is None:
            gate = self._gate = _Gate()
        elif gate.has_ended:
            raise RuntimeError(_ENDED)
        # Also if it is open: an interrupt may have come before its stages.
        self._put_stages()
        return gate

    def _open(self, gate: _Gate) -> None:
        gate.open()
        if gate.limit is None:
            self._remove_gate()

    def _remove_gate(self) -> None:
        """Lets all batches through: a new epoch begins without a limit, as that of a new iterator.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        gate = self._gate
        if gate is not None:
            raise_if_ended(self)
            self._gate = None
            if gate.has_ended:
                # By a signal handler, or another thread, since it was looked at.
                self._gate = gate
            self._put_stages()

    def _stop(self, message: str) -> None:
        """Wakes a thread that waits for a batch, which raises this message."""


class _Gate:
    """Lets batches through to the caller, up to a limit.

    INVARIANT: each step is atomic under the interpreter lock, because threads may share an iterator.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.has_ended = False
        # Taken by calls that got no batch.
        self._returned: collections.deque[object] = collections.deque()
        self._permits: Iterator[object] = iter(())
        self.open()

    def open(self) -> None:
        self._returned = collections.deque()
        self._permits = itertools.repeat(None) if self.limit is None else iter(range(self.limit))

    def close(self) -> None:
        self._returned = collections.deque()
        self._permits = iter(())

    def is_closed(self) -> bool:
        return not self._returned and operator.length_hint(self._permits, 1) == 0

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` with this gate around it."""
        return functools.partial(self._next, take)

    def _next(self, take: Callable[[Any], Any], iterator: OurIterator) -> Any:
        if self.has_ended:
            raise RuntimeError(_ENDED)
        returned, permits = self._returned, self._permits
        try:
            permit = returned.pop()
        except IndexError:
            permit = next(permits)
        try:
            return take(iterator)
        except BaseException:
            returned.append(permit)
            raise


def end(iterator: Pausing) -> None:
    """Makes ``next`` raise from now on, also in a thread that waits for a batch."""
    # Another thread may remove the gate meanwhile.
    while not has_ended(iterator):
        iterator._put_gate().has_ended = True
    iterator._stop(_ENDED)


def has_ended(iterator: Pausing) -> bool:
    """True if the iterator was ended by ``DataLoader.shutdown``."""
    return iterator._gate is not None and iterator._gate.has_ended


def raise_if_ended(iterator: Pausing) -> None:
    """Raises an error if the iterator was ended, in place of an error of its end.

    Raises:
        RuntimeError: Says so.
    """
    if has_ended(iterator):
        raise RuntimeError(_ENDED) from None
