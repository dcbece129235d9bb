"""The dataset and the functions of a loader, pickled once and put into Ray's store once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import ray
import ray.cloudpickle

from ringloader._features.pools.objects import Key, Record
from ringloader._start import fallback


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


class RayRecord(Record):
    """The objects of one loader in Ray's store, in the state of its first iterator.

    Raises:
        TypeError: If one of them cannot be pickled.
    """

    def __init__(self, number: int, things: Mapping[str, Any]) -> None:
        super().__init__(number, things)
        self.ref: Any = ray.put(_pickled(things))


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
