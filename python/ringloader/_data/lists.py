"""A list whose items lie in shared memory as bytes: processes that read it change no count in it."""

from __future__ import annotations

import itertools
import operator
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeVar, overload

import ringloader._native as _native

if TYPE_CHECKING or _native.SUPPORTED:
    from ringloader._native import SharedItems
else:
    from ringloader._data.private import PrivateItems as SharedItems

_T = TypeVar("_T")


class SharedList(SharedItems, Sequence[_T]):
    """An immutable list in shared memory, for worker processes that read a large list.

    Reading a plain list writes reference counts, so the system copies its pages into each worker. Reading a
    ``SharedList`` makes a new object from the item's bytes, and writes nothing. If you change the object, the
    list does not change.

    Building a list takes no more private memory than its largest item and a few MiB. The memory is freed with
    the last process that has the list. Each process keeps one file descriptor for it. A slice is a list over
    the same memory, and a copy is the same object. A new process gets only the descriptor, with any start
    method. Any other pickle has the bytes.

    On macOS and Windows, the items are pickles in the memory of the process, and each new process gets its
    own copy.

    Native code reads strings, bytes, booleans, ``None``, floats, integers of 64 bits, and plain tuples, lists
    and dicts of these. Any other item is pickled as a whole, and unpickled each time it is read.

    Args:
        iterable: The items, read one by one. If it is a ``SharedList``, the new list shares its memory.

    Raises:
        pickle.PicklingError: If an item cannot be pickled; the message has its position.
        MemoryError: If the machine or a control group has too little memory; the message has the figures.
        RuntimeError: If a child is forked while the list is built, and continues to build it.
        OSError: If the system refuses memory or a descriptor.
    """

    # Items may be equal and not hashable, as those of a list.
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, iterable: Iterable[_T] | _native.SharedItems = (), /) -> Self:
        return super().__new__(cls, iterable)

    if TYPE_CHECKING:

        def __init__(self, iterable: Iterable[_T] | _native.SharedItems = (), /) -> None: ...

        # Only what the native slots take and give: a method of Python's would take longer than the look.
        @overload
        def __getitem__(self, key: SupportsIndex) -> _T: ...
        @overload
        def __getitem__(self, key: slice) -> Self: ...
        def __getitem__(self, key: Any) -> Any: ...

    def __iter__(self) -> Iterator[_T]:
        # The look itself, without a call of Python's.
        return map(operator.getitem, itertools.repeat(self), range(len(self)))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the position of the first item that equals ``value``, as ``list.index``.

        Raises:
            ValueError: If there is none.
        """
        try:
            return super().index(value, start, stop)  # type: ignore[arg-type]
        except ValueError:
            raise ValueError(f"{value!r} is not in list") from None

    def __eq__(self, other: object) -> bool:
        """True if ``other`` is a list or a ``SharedList`` of equal items."""
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        if isinstance(other, SharedList) and self.is_same(other):
            return True
        return len(self) == len(other) and all(
            mine is theirs or mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    def __repr__(self) -> str:
        shown = [repr(item) for item in self[:3]]
        if len(self) > len(shown):
            shown.append("...")
        return f"{type(self).__name__}([{', '.join(shown)}], len={len(self)}, nbytes={self.nbytes})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Attributes of a subclass; usually there are none.
        attributes = self.__dict__ or None
        if not _native.SUPPORTED:
            return type(self), (list(self),), attributes
        if context.get_spawning_popen() is None:
            return _of_bytes, (type(self), self.to_bytes()), attributes
        return _of_descriptor, (type(self), reduction.DupFd(self.fileno()), self.extent()), attributes


def _of_bytes(kind: type[SharedList[Any]], data: bytes) -> SharedList[Any]:
    if not _native.SUPPORTED:
        raise pickle.UnpicklingError(
            "a SharedList that was pickled on Linux cannot be read on this system: pickle list(it) there"
        )
    return kind(_native.SharedItems.from_bytes(data))


def _of_descriptor(kind: type[SharedList[Any]], sent: Any, extent: tuple[int, int, int]) -> SharedList[Any]:
    fd = sent.detach()
    try:
        return kind(_native.SharedItems.attach(fd, *extent))
    finally:
        os.close(fd)


SharedList.__module__ = "ringloader"
