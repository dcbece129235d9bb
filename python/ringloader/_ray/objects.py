"""The dataset and the functions of a loader, pickled once and put into Ray's store once."""

from __future__ import annotations

import collections
import io
import itertools
import pickle
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
import ray.cloudpickle

from ringloader._pool.objects import things_of
from ringloader._start import fallback

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The number of a record and an argument's name: by them an actor finds an object of a loader.
Key = tuple[int, str]


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by value what no module has, and notes the classes of the main module among it.

    Args:
        file: Where the pickle goes.
        keys: By their addresses, objects that the actor has, with their keys.
    """

    # The table of Ray's class hides the attribute that a pickler reads.
    dispatch_table = vars(pickle.Pickler)["dispatch_table"]

    def __init__(self, file: io.BytesIO, keys: Mapping[int, Key]) -> None:
        super().__init__(file, pickle.DEFAULT_PROTOCOL)
        self.dispatch_table = fallback.reducers_of(ray.cloudpickle.CloudPickler)
        self._keys = keys
        self.named: list[type] = []

    def persistent_id(self, thing: Any) -> Key | None:
        return self._keys.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type) and thing.__module__ == "__main__" and thing not in self.named:
            self.named.append(thing)
        return super().reducer_override(thing)


def dumps(thing: object, keys: Mapping[int, Key]) -> bytes:
    """Pickles an object for an actor, with the classes of the main module that it needs.

    Args:
        thing: The object.
        keys: By their addresses, objects that the actor has, with their keys.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, keys)
    # The list is pickled last, and has by then what the object needs.
    pickler.dump((thing, pickler.named))
    return file.getvalue()


class Record:
    """The objects of one loader, in the state of its first iterator.

    Args:
        number: The number by which actors hold it.
        things: The objects, by their arguments.

    Raises:
        TypeError: If one of them cannot be pickled.
    """

    def __init__(self, number: int, things: Mapping[str, Any]) -> None:
        self.number = number
        self._find = {name: _finder(thing) for name, thing in things.items()}
        self.ref: Any = ray.put(_pickled(things))

    def is_of(self, things: Mapping[str, Any]) -> bool:
        """True if these are the same objects."""
        return self._find.keys() == things.keys() and all(
            find() is things[name] for name, find in self._find.items()
        )

    def keys(self) -> dict[int, Key]:
        """Returns the keys of the objects that are still there, by their addresses."""
        found = ((name, find()) for name, find in self._find.items())
        return {id(thing): (self.number, name) for name, thing in found if thing is not None}


def _pickled(things: Mapping[str, Any]) -> bytes:
    try:
        return dumps(dict(things), {})
    except Exception as error:
        for name, thing in things.items():
            try:
                dumps(thing, {})
            except Exception as why:
                raise TypeError(
                    f"{name} cannot be pickled for workers on other machines ({type(why).__name__}: {why}); "
                    "let each worker make what cannot be pickled, at the first use"
                ) from error
        raise TypeError(
            f"the loader's objects cannot be pickled for workers on other machines: {error}"
        ) from error


def _finder(thing: Any) -> Any:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


class Records:
    """The records of the loaders that live."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._records: dict[int, Record] = {}
        # Loaders that have gone, by address: added from finalizers, so anywhere.
        self._gone: collections.deque[int] = collections.deque()

    def record_of(self, loader: TorchLoader) -> Record:
        """Returns the record of a loader: a new one if the loader has other objects than before.

        Raises:
            TypeError: If one of them cannot be pickled.
        """
        self._tidy()
        things = things_of(loader)
        record = self._records.get(id(loader))
        if record is None or not record.is_of(things):
            is_new = record is None
            record = Record(next(self._numbers), things)
            self._records[id(loader)] = record
            if is_new:
                weakref.finalize(loader, self._gone.append, id(loader)).atexit = False
        return record

    def numbers(self) -> frozenset[int]:
        """Returns the numbers of all records. An actor forgets what has another one."""
        self._tidy()
        return frozenset(record.number for record in self._records.values())

    def _tidy(self) -> None:
        while self._gone:
            self._records.pop(self._gone.popleft(), None)
