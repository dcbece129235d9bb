"""Records of the objects that loaders have for their workers, which are pickled once for each loader."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringloader._features.table import callables_of
from ringloader._start import pickled

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The number of a record and an argument's name: by them a worker finds an object of a loader.
Key = tuple[int, str]

# Moments, in their order.
moments = itertools.count()


class Record:
    """The dataset and the functions of one loader, by their arguments, in one state.

    Does not keep them alive, where they can be referred to weakly.

    Args:
        number: The number by which workers hold them.
        things: The objects.
    """

    def __init__(self, number: int, things: Mapping[str, Any]) -> None:
        self.number = number
        self._find = {name: _finder(thing) for name, thing in things.items()}

    def things(self) -> dict[str, Any]:
        """Returns the objects that are still there."""
        found = ((name, find()) for name, find in self._find.items())
        return {name: thing for name, thing in found if thing is not None}

    def keys(self) -> dict[int, Key]:
        """Returns the keys of the objects that are still there, by their addresses."""
        return {id(thing): (self.number, name) for name, thing in self.things().items()}

    def is_of(self, things: Mapping[str, Any]) -> bool:
        """True if these are the same objects."""
        return self._find.keys() == things.keys() and all(
            find() is things[name] for name, find in self._find.items()
        )


class PoolRecord(Record):
    """The objects of one loader that processes of a pool are sent."""

    def __init__(self, number: int, things: Mapping[str, Any]) -> None:
        super().__init__(number, things)
        # The pickle that processes are sent; None before the first iterator, and with `is_for_each`.
        self.pickled: pickled.Pickled | None = None
        # True if each process gets a pickle of its own.
        self.is_for_each = False
        self.made_at = next(moments)
        # True if a process may need the main module to unpickle them.
        self.names_main = True

    def is_ready(self) -> bool:
        """True if it can be sent."""
        return self.pickled is not None or self.is_for_each

    def set_ready(self, made: pickled.Pickled | None) -> None:
        """Takes what :meth:`made_ready` has returned."""
        self.pickled = made
        self.is_for_each = made is None
        self.names_main = made is None or made.names_main()

    def made_ready(self, finds_main: bool) -> pickled.Pickled | None:
        """Pickles the objects in their state of now. Calls the user's code, so hold no lock.

        Args:
            finds_main: True if the processes have the main module.

        Returns:
            The pickle, or None if each process must get its own.

        Raises:
            BaseException: What pickling raises.
        """
        try:
            return pickled.for_all(self.things(), finds_main=finds_main)
        except pickled.NotForAllError:
            return None


def _finder(thing: Any) -> Callable[[], Any]:
    try:
        # A dataset may have its loader, and a loader has its pool.
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


_Record = TypeVar("_Record", bound=Record)


class LoaderObjects(Generic[_Record]):
    """The records of the loaders that live.

    Args:
        make: Makes a record of a number and the objects.
    """

    def __init__(self, make: Callable[[int, Mapping[str, Any]], _Record]) -> None:
        self._make = make
        self._numbers = itertools.count()
        self._records: dict[int, _Record] = {}
        # Loaders that have gone, by address: added from finalizers, so anywhere.
        self._gone: collections.deque[int] = collections.deque()

    def record_of(self, loader: TorchLoader, when_gone: Callable[[int], None] | None = None) -> _Record:
        """Returns the record of a loader: a new one if the loader has other objects than before.

        Args:
            loader: The loader.
            when_gone: Called with its address in place of :meth:`add_gone`, when it goes.

        Raises:
            BaseException: What making a record raises.
        """
        self.tidy()
        things = things_of(loader)
        record = self._records.get(id(loader))
        if record is None or not record.is_of(things):
            made = self._make(next(self._numbers), things)
            if record is None:
                weakref.finalize(loader, when_gone or self.add_gone, id(loader)).atexit = False
            record = self._records[id(loader)] = made
        return record

    def renewed(self, loader: TorchLoader, record: _Record) -> _Record:
        """Returns a record of the same objects, which workers are sent in their state of now."""
        new = self._make(next(self._numbers), record.things())
        if self._records[id(loader)] is record:
            self._records[id(loader)] = new
        return new

    def numbers(self) -> set[int]:
        """Returns the numbers of all records. A worker forgets what has another one."""
        self.tidy()
        return {record.number for record in self._records.values()}

    def add_gone(self, loader: int) -> None:
        """Takes the address of a loader that has gone. Called from a finalizer, so anywhere."""
        self._gone.append(loader)

    def has_gone(self) -> bool:
        """True if :meth:`tidy` has something to do."""
        return bool(self._gone)

    def tidy(self) -> None:
        """Drops the records of loaders that have gone."""
        while self._gone:
            self._records.pop(self._gone.popleft(), None)


def things_of(loader: TorchLoader) -> dict[str, Any]:
    """Returns the objects of a loader that its workers are sent once, by their arguments."""
    things = {
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        **callables_of(loader),
    }
    return {name: thing for name, thing in things.items() if thing is not None}
