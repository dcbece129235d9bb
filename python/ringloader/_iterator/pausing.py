"""``limit``, ``pause`` and ``resume`` of an iterator, and its end by ``DataLoader.shutdown``."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

_ENDED = (
    "this iterator was ended by DataLoader.shutdown(), or by the end of the loader's with block: "
    "call iter() on the loader for another one"
)


class Pausing:
    """Methods of ringloader's iterators that torch's do not have.

    An iterator without a limit has no gate: the gate stands before ``_take_next`` while it is needed.
    """

    # Gives the next batch to the iterator that it is called with.
    _take_next: Callable[[Any], Any]
    _gate: _Gate | None = None

    def limit(self, num_batches: int | None) -> None:
        """Has ``next`` raise ``StopIteration`` after ``num_batches`` more batches, until :meth:`resume`.

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
        """Has ``next`` raise ``StopIteration`` until :meth:`resume`. Workers get no new tasks meanwhile.

        What they were asked for before they still make, and it stays ready. A call of ``next`` that waits in
        another thread gets its batch.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        self._put_gate().close()

    def resume(self) -> None:
        """Goes on where the iterator was paused, or stopped at its limit, which begins anew.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        self._open(self._put_gate())

    def is_paused(self) -> bool:
        """True while ``next`` raises ``StopIteration`` because of :meth:`pause` or :meth:`limit`."""
        gate = self._gate
        return gate is not None and not gate.has_ended and gate.is_closed()

    def _is_refused(self) -> bool:
        """True if the call of ``next`` that has raised was not let through, and so changed nothing."""
        return self._gate is not None and not self._gate.has_let_through

    def _put_gate(self) -> _Gate:
        """Returns the iterator's gate, which is put there if there is none."""
        if self._gate is None:
            self._gate = _Gate(self._take_next)
            self._take_next = functools.partial(_take_next, self._gate)
        elif self._gate.has_ended:
            raise RuntimeError(_ENDED)
        return self._gate

    def _open(self, gate: _Gate) -> None:
        gate.open()
        if gate.limit is None:
            self._remove_gate()

    def _remove_gate(self) -> None:
        """Lets all batches through: a new epoch begins without a limit, as that of a new iterator.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        if self._gate is not None:
            raise_if_ended(self)
            self._take_next, self._gate = self._gate.take, None

    def _stop(self, message: str) -> None:
        """Wakes a thread that waits for a batch, which raises this message."""


class _Gate:
    """Lets batches through to the caller, up to a limit.

    INVARIANT: each step is one for the interpreter, because threads may share an iterator.
    """

    def __init__(self, take: Callable[[Any], Any]) -> None:
        self.take = take
        self.limit: int | None = None
        self.has_ended = False
        # False if the last call was refused.
        self.has_let_through = True
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

    def next(self, iterator: Any) -> Any:
        """Returns the iterator's next batch."""
        self.has_let_through = False
        if self.has_ended:
            raise RuntimeError(_ENDED)
        returned, permits = self._returned, self._permits
        try:
            permit = returned.pop()
        except IndexError:
            permit = next(permits)
        self.has_let_through = True
        try:
            return self.take(iterator)
        except BaseException:
            returned.append(permit)
            raise


def _take_next(gate: _Gate, iterator: Any) -> Any:
    return gate.next(iterator)


def end(iterator: Pausing) -> None:
    """Has ``next`` raise from now on, also in a thread that waits for a batch."""
    if not has_ended(iterator):
        iterator._put_gate().has_ended = True
    iterator._stop(_ENDED)


def has_ended(iterator: Pausing) -> bool:
    """True if the iterator was ended by ``DataLoader.shutdown``."""
    return iterator._gate is not None and iterator._gate.has_ended


def raise_if_ended(iterator: Pausing) -> None:
    """Raises, for an iterator that was ended, in place of what its end has led to.

    Raises:
        RuntimeError: Says so.
    """
    if has_ended(iterator):
        raise RuntimeError(_ENDED) from None
