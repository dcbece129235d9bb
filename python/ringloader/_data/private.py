"""Stand-ins for the memory of ``SharedList`` and ``CachedDataset`` where processes cannot share any."""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Iterable
from typing import Any, Self

# Without a `max_bytes`: what a process may keep. How much memory is left, no common way tells.
_MOST_BYTES = 1 << 30


class PrivateSamples:
    """Samples of a dataset, as pickles. Has the methods of ``_native.SampleCache`` that share nothing.

    Args:
        length: The length of the dataset.
        max_bytes: The most bytes that they take; None: 1 GiB.
    """

    def __init__(self, length: int, max_bytes: int | None) -> None:
        self._length = length
        self._most = _MOST_BYTES if max_bytes is None else max_bytes
        self._lock = threading.Lock()
        self._pickles: dict[int, bytes] = {}
        self._nbytes = self._hits = self._misses = 0
        self._is_full = False

    def __len__(self) -> int:
        return self._length

    def get(self, index: int, default: object) -> Any:
        """Returns a new object of the sample that is kept, or ``default``."""
        found = self._pickles.get(index)
        if found is None:
            return default
        with self._lock:
            self._hits += 1
        return pickle.loads(found)

    def put(self, index: int, sample: object) -> tuple[Any, bool]:
        """Returns a copy of ``sample``, and True if it is too large to be kept. Keeps it if there is room."""
        with self._lock:
            self._misses += 1
        pickled = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
        is_too_large = len(pickled) > self._most
        with self._lock:
            used = self._nbytes + len(pickled) - len(self._pickles.get(index, b""))
            if used <= self._most:
                self._pickles[index], self._nbytes = pickled, used
            elif not is_too_large:
                self._is_full = True
        return pickle.loads(pickled), is_too_large

    def clear(self) -> None:
        """Forgets all samples."""
        with self._lock:
            self._pickles.clear()
            self._nbytes, self._is_full = 0, False

    def stats(self) -> tuple[int, int, int, int, int, bool]:
        """Returns items, bytes, bound, hits, misses, and True if a sample had no room."""
        with self._lock:
            kept = len(self._pickles), self._nbytes, self._most
            return *kept, self._hits, self._misses, self._is_full


class PrivateItems:
    """A list of any objects as bytes. Has the methods of ``_native.SharedItems`` that share nothing.

    Args:
        iterable: The items, or another such list, whose bytes are then used.

    Raises:
        pickle.PicklingError: If an item cannot be pickled; the message has its position.
    """

    __slots__ = ("_items",)

    _items: list[bytes]

    def __new__(cls, iterable: Iterable[Any] = (), /) -> Self:
        made = super().__new__(cls)
        if isinstance(iterable, PrivateItems):
            made._items = iterable._items
        else:
            made._items = [_pickled(number, item) for number, item in enumerate(iterable)]
        return made

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: Any, /) -> Any:
        if isinstance(key, slice):
            part = PrivateItems.__new__(type(self))
            part._items = self._items[key]
            return part
        return pickle.loads(self._items[operator.index(key)])

    @property
    def nbytes(self) -> int:
        """The bytes of all items."""
        return sum(map(len, self._items))

    def is_same(self, other: PrivateItems) -> bool:
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
