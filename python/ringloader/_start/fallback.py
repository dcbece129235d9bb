"""A second attempt for objects that the ordinary pickle cannot send: by cloudpickle, where it is installed.

If that fails too, the error names the object and its place.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import gc
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import reduction
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import IO, Any, TypeVar

from ringloader._common.text import shown
from ringloader._start import definitions

NewPickler = Callable[[IO[bytes]], pickle.Pickler]
# Other ways for a loader that starts its own workers.
WITHOUT_PICKLE = "multiprocessing_context='fork' or worker_method='thread', which send nothing"

_T = TypeVar("_T")
# Raised for objects that cannot be pickled; the last one for locks of another start method.
_ERRORS = (TypeError, AttributeError, pickle.PicklingError, RuntimeError)
# Types of the parts of functions and classes, which the ordinary pickle refuses.
_PARTS = {
    abc.abstractclassmethod,
    abc.abstractmethod,
    abc.abstractproperty,
    abc.abstractstaticmethod,
    classmethod,
    CellType,
    CodeType,
    GetSetDescriptorType,
    MethodType,
    property,
    staticmethod,
    TypeVar,
    getattr(dataclasses, "_FIELD_BASE", None),
}
# Objects that are searched for the place of one of them.
_MOST_SEARCHED = 100_000


def attempt(
    thing: object, dump: Callable[[NewPickler], _T], ways: str = "", *, finds_main: bool = False
) -> _T:
    """Calls ``dump`` with the ordinary pickler, and if that cannot pickle ``thing``, with cloudpickle's.

    Args:
        thing: The object. The names of its fields or keys begin the place that an error tells.
        dump: Pickles it with a pickler that it makes. Called again, it begins anew.
        ways: Other ways to have workers, for people.
        finds_main: True if the processes have the main module. Its classes and functions are then sent by
            name, so that they are the main process's, in batches too.

    Raises:
        BaseException: What the first call raises, with a note, if both fail; else what a call raises.
    """
    try:
        return dump(reduction.ForkingPickler)
    except _ERRORS as error:
        module = _cloudpickle()
        # The last object that the pickler came to. Needs no frame for each.
        last: collections.deque[object] = collections.deque(maxlen=1)
        try:
            return dump(functools.partial(_recording_pickler, module, finds_main, last.append))
        except _ERRORS as again:
            _explain(error, again if module is not None else None, thing, last, ways)
        raise


def by_value(dump: Callable[[NewPickler], _T]) -> _T | None:
    """Calls ``dump`` with cloudpickle's pickler, which names nothing of the main module.

    Returns:
        What the call returns; None without cloudpickle, or if it cannot pickle the object.
    """
    module = _cloudpickle()
    if module is None:
        return None
    try:
        return dump(functools.partial(_recording_pickler, module, False, lambda _: None))
    except _ERRORS:
        return None


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def reducers_of(pickler: Any) -> dict[Any, Callable[[Any], Any]]:
    """Returns the reducers of a class of cloudpickle's, without those that send a copy of another kind.

    cloudpickle sends an open file as its text, and bytes for a ``memoryview``. It is asked for functions and
    classes. For all else the ordinary pickle's answer counts.
    """
    found = {
        kind: reduce
        for kind, reduce in pickler.dispatch_table.items()
        if kind in _PARTS or not getattr(reduce, "__module__", "").endswith("cloudpickle.cloudpickle")
    }
    return found | {ModuleType: _reduce_module, MappingProxyType: _reduce_view}


def _reduce_module(module: ModuleType) -> Any:
    """Reduces a module to its name. Functions refer to modules."""
    if sys.modules.get(module.__name__) is not module:
        return module.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return importlib.import_module, (module.__name__,)


def _reduce_view(view: Any) -> Any:
    """Reduces a read-only view with what it shows. Fields of dataclasses have one."""
    return MappingProxyType, tuple(gc.get_referents(view))


def _recording_pickler(
    module: Any, finds_main: bool, record: Callable[[object], None], file: IO[bytes]
) -> pickle.Pickler:
    pickler: pickle.Pickler = reduction.ForkingPickler(file)
    if module is not None:
        ours = pickler.dispatch_table

        class Pickler(module.Pickler):  # type: ignore[misc]
            # The table of cloudpickle's class hides the attribute that a pickler reads.
            dispatch_table = vars(pickle.Pickler)["dispatch_table"]

            def reducer_override(self, thing: Any) -> Any:
                if finds_main and definitions.is_found_by_name(thing):
                    return NotImplemented
                return super().reducer_override(thing)

        pickler = Pickler(file, pickle.DEFAULT_PROTOCOL)
        pickler.dispatch_table = {**reducers_of(module.Pickler), **ours}
    # The None that it returns means: pickle the object itself.
    pickler.persistent_id = record  # type: ignore[method-assign]
    return pickler


def _explain(
    error: BaseException,
    by_cloudpickle: BaseException | None,
    thing: object,
    last: collections.deque[object],
    ways: str,
) -> None:
    if not last:
        return
    culprit = last.pop()
    place = _place(culprit, thing)
    where = "" if place is None else f"{place}: "
    text = f"{where}{shown(culprit, 200)} cannot be pickled for worker processes"
    if type(culprit).__module__ == "multiprocessing.synchronize":
        text += ": make it with multiprocessing.get_context('spawn')"
    elif by_cloudpickle is None:
        text += (
            ": use a function or class of a module, or install cloudpickle (pip install "
            "ringloader[cloudpickle])"
        )
    else:
        text += f", nor by cloudpickle ({by_cloudpickle}): let each worker make its own, at the first use"
    error.add_note(text + (f", or pass {ways}" if ways else ""))


def _place(culprit: object, thing: object) -> str | None:
    """Returns the place of an object in another one; None if it is not found. Calls nothing of the user's."""
    pending: collections.deque[tuple[str, object]] = collections.deque([("", thing)])
    # The objects too: the address of one that goes might be another's.
    seen: dict[int, object] = {}
    while pending and len(seen) < _MOST_SEARCHED:
        place, one = pending.popleft()
        if one is culprit or type(one) is culprit:
            return place or None
        if id(one) not in seen:
            seen[id(one)] = one
            pending.extend((_joined(place, part), inner) for part, inner in _parts(one))
    return None


def _joined(place: str, part: str) -> str:
    return place + part if place else part.removeprefix(".")


def _parts(one: Any) -> Iterator[tuple[str, object]]:
    kind = type(one)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        yield from ((f".{name}", inner) for name, inner in zip(kind._fields, tuple(one), strict=False))
    elif kind in (list, tuple):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(one))
    elif kind is dict:
        yield from ((f"[{shown(key, 50)}]", inner) for key, inner in one.items())
    elif kind is Arguments:
        yield from ((f".{name}", inner) for name, inner in one.items())
    elif kind is functools.partial:
        yield ".func", one.func
        yield from ((f".args[{index}]", inner) for index, inner in enumerate(one.args))
        yield from ((f".keywords[{name!r}]", inner) for name, inner in one.keywords.items())
    elif kind is MethodType:
        yield ".__self__", one.__self__
    elif kind is FunctionType:
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=False):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:
                # The cell has no value yet.
                continue
    elif not issubclass(kind, type):
        try:
            state = object.__getattribute__(one, "__dict__")
        except AttributeError:
            return
        if isinstance(state, Mapping):
            yield from ((f".{name}", inner) for name, inner in state.items())


class Arguments(dict[str, Any]):
    """Objects of a loader, by the names of its arguments."""
