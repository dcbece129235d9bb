"""``limit``, ``pause`` and ``resume`` of an iterator, and its end by ``DataLoader.shutdown``.

An iterator that has none of them has no trace of them: a gate is put before its next batch when it is first
needed, as attributes of the object, and goes when it lets all through.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# By which native scheduling, and torch's `__next__`, get the next batch.
_NATIVE = "_take_next"
_TORCHS = "_next_data"
_GATE = "_ringloader_gate"

_ENDED = (
    "this iterator was ended by DataLoader.shutdown(), or by the end of the loader's with block: "
    "call iter() on the loader for another one"
)


class Pausing:
    """What iterators of ringloader have beside torch's methods."""

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
        _limit(self, num_batches)

    def pause(self) -> None:
        """Has ``next`` raise ``StopIteration`` until :meth:`resume`. Workers get no new tasks meanwhile.

        What they were asked for before they still make, and it stays ready. A call of ``next`` that waits in
        another thread gets its batch.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        _pause(self)

    def resume(self) -> None:
        """Goes on where the iterator was paused, or stopped at its limit, which begins anew.

        Raises:
            RuntimeError: If the iterator was ended.
        """
        _resume(self)

    def is_paused(self) -> bool:
        """Whether ``next`` raises ``StopIteration`` because of :meth:`pause` or :meth:`limit`."""
        return _is_paused(self)


class _Gate:
    """Lets batches through to the caller, up to a limit.

    INVARIANT: each step is one for the interpreter, because threads may share an iterator.
    """

    def __init__(self, take: Callable[[Any], Any] | None) -> None:
        # What native scheduling has called before; None where torch schedules.
        self.take = take
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

    def through(self, take: Callable[[], Any]) -> Any:
        """The batch that ``take`` gives."""
        if self.has_ended:
            _raise_ended()
        returned, permits = self._returned, self._permits
        try:
            permit = returned.pop()
        except IndexError:
            permit = next(permits)
        try:
            return take()
        except BaseException:
            returned.append(permit)
            raise


def attach(iterator: Any) -> None:
    """Gives an iterator of torch's own the methods, and leaves its class."""
    if isinstance(iterator, Pausing) or not hasattr(type(iterator), _TORCHS):
        return
    # Weakly: in a cycle with itself, an iterator would keep its workers until it is collected.
    itself = weakref.ref(iterator)
    own = vars(iterator)
    for name, method in _METHODS.items():
        own[name] = functools.partial(_call, itself, method)


def end(iterator: Any) -> None:
    """From now on ``next`` raises, also in a thread that waits for a batch."""
    if not _has_ended(iterator):
        _gate_of(iterator).has_ended = True
    vars(iterator).update(_reset=_raise_ended, _try_get_data=_raise_ended, _process_data=_raise_ended)
    # One of torch's own wakes up by itself, when it looks for workers that were lost.
    stop = getattr(iterator, "_stop", None)
    if stop is not None:
        stop(_ENDED)


def raise_if_ended(iterator: Any) -> None:
    """Raises if the iterator was ended: in place of what its end has led to.

    Raises:
        RuntimeError: Says so.
    """
    if _has_ended(iterator):
        raise RuntimeError(_ENDED) from None


def _call(itself: weakref.ref[Any], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    iterator = itself()
    return None if iterator is None else method(iterator, *args, **kwargs)


def _limit(iterator: Any, num_batches: int | None) -> None:
    if num_batches is not None:
        if not isinstance(num_batches, int) or isinstance(num_batches, bool):
            raise TypeError(f"num_batches must be an int or None, not {num_batches!r}")
        if num_batches <= 0:
            raise ValueError(f"num_batches must be positive, not {num_batches}: to stop now, call pause()")
    gate = _gate_of(iterator)
    was_paused = gate.is_closed()
    gate.limit = num_batches
    if not was_paused:
        _open(iterator, gate)


def _pause(iterator: Any) -> None:
    _gate_of(iterator).close()


def _resume(iterator: Any) -> None:
    _open(iterator, _gate_of(iterator))


def _is_paused(iterator: Any) -> bool:
    gate: _Gate | None = vars(iterator).get(_GATE)
    return gate is not None and not gate.has_ended and gate.is_closed()


def _has_ended(iterator: Any) -> bool:
    gate: _Gate | None = vars(iterator).get(_GATE)
    return gate is not None and gate.has_ended


def _open(iterator: Any, gate: _Gate) -> None:
    gate.open()
    if gate.limit is None:
        _remove(iterator)


def _gate_of(iterator: Any) -> _Gate:
    """Its gate, which is put there if there is none."""
    own = vars(iterator)
    found: _Gate | None = own.get(_GATE)
    if found is not None:
        if found.has_ended:
            _raise_ended()
        return found
    itself = weakref.ref(iterator)
    gate = _Gate(None if own.get("_torch_schedules") else own.get(_NATIVE))
    own[_GATE] = gate
    own["_reset"] = functools.partial(_reset, itself)
    if gate.take is not None:
        own[_NATIVE] = functools.partial(_take_next, gate, gate.take)
    else:
        own[_TORCHS] = functools.partial(_next_data, gate, itself)
    return gate


def _remove(iterator: Any) -> None:
    own = vars(iterator)
    gate: _Gate = own.pop(_GATE)
    del own["_reset"]
    if gate.take is not None:
        own[_NATIVE] = gate.take
    else:
        del own[_TORCHS]


def _take_next(gate: _Gate, take: Callable[[Any], Any], iterator: Any) -> Any:
    return gate.through(functools.partial(take, iterator))


def _next_data(gate: _Gate, itself: weakref.ref[Any]) -> Any:
    iterator: Any = itself()
    return gate.through(functools.partial(type(iterator)._next_data, iterator))


def _reset(itself: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    """A new epoch of persistent workers, which begins without a limit, as that of a new iterator."""
    iterator: Any = itself()
    _remove(iterator)
    return type(iterator)._reset(iterator, *args, **kwargs)


def _raise_ended(*_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(_ENDED)


_METHODS: dict[str, Callable[..., Any]] = {
    "limit": _limit,
    "pause": _pause,
    "resume": _resume,
    "is_paused": _is_paused,
}
