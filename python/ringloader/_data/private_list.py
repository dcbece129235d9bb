"""The items of a ``SharedList`` where processes cannot share them: each process has its own."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterable
from typing import Any, Self


class PrivateSequence:
    """A list of any objects as bytes. Has the methods of ``_native.SharedSequence`` that share nothing.

    Args:
        iterable: The items, or another such list, whose bytes are then used.

    Raises:
        pickle.PicklingError: If an item cannot be pickled; the message has its position.
    """

    __slots__ = ("_items",)

    _items: list[bytes]

    def __new__(cls, iterable: Iterable[Any] = (), /) -> Self:
        made = super().__new__(cls)
        if isinstance(iterable, PrivateSequence):
            made._items = iterable._items
        else:
            made._items = [_pickled(number, item) for number, item in enumerate(iterable)]
        return made

    @classmethod
    def of_items(cls, items: list[bytes]) -> Self:
        """Returns the list of items that :meth:`to_items` has given."""
        made = PrivateSequence.__new__(cls)
        made._items = items
        return made

    def to_items(self) -> list[bytes]:
        """Returns the pickle of each item."""
        return self._items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: Any, /) -> Any:
        if isinstance(key, slice):
            return self.of_items(self._items[key])
        return pickle.loads(self._items[operator.index(key)])

    @property
    def nbytes(self) -> int:
        """The bytes of all items."""
        return sum(map(len, self._items))

    def is_same(self, other: PrivateSequence) -> bool:
        """True if both have the same bytes in memory."""
        return self._items is other._items


def _pickled(number: int, item: object) -> bytes:
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        raise pickle.PicklingError(
            f"item {number}, of type {type(item).__name__}, cannot be pickled: {error}"
        ) from error
