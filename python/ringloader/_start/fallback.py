"""A second attempt for objects that the ordinary pickle cannot send: by cloudpickle, where it is installed.

If that fails too, a note names the type.
"""

from __future__ import annotations

import collections
import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from types import FunctionType
from typing import IO, Any, TypeVar

from ringloader._common.attributes import shown

NewPickler = Callable[[IO[bytes]], pickle.Pickler]
# Other ways for a loader that starts its own workers.
WITHOUT_PICKLE = "multiprocessing_context='fork' or worker_method='thread', which send nothing"

_T = TypeVar("_T")
# Raised for objects that cannot be pickled; the last one for locks of another start method.
_ERRORS = (TypeError, AttributeError, pickle.PicklingError, RuntimeError)
# cloudpickle sends a file as its text, and bytes for a view: copies that nobody asked for.
_COPIED = {io.TextIOWrapper, memoryview}


def main_is_found() -> bool:
    """True if processes that do not fork run the main module again, and so have its functions and classes.

    They cannot where it is a notebook, an interactive session or ``python -c``. MIRRORS multiprocessing
    spawn.py::_fixup_main_from_name, which leaves out the ``__main__`` of a package.
    """
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is None:
        return getattr(main, "__file__", None) is not None
    return bool(name.rpartition(".")[2] != "__main__")


def attempt(dump: Callable[[NewPickler], _T], ways: str = "", *, finds_main: bool = True) -> _T:
    """Calls ``dump`` with the ordinary pickler, and if that cannot pickle its object, with cloudpickle's.

    Args:
        dump: Pickles the object with a pickler that it makes. Called again, it begins anew.
        ways: Other ways to have workers, for people.
        finds_main: True if the processes have the main module. Its classes and functions are then sent by
            name, so that they are the main process's, in batches too. Else they go by cloudpickle.

    Raises:
        BaseException: What the first call raises, with a note, if both fail; else what a call raises.
    """
    last: collections.deque[object] = collections.deque(maxlen=1)
    module = None if finds_main else _cloudpickle()
    if module is not None:
        try:
            return dump(functools.partial(_by_cloudpickle, module, finds_main, last))
        except _ERRORS as error:
            error.add_note(_explanation(last, error, ways))
            raise
    try:
        return dump(reduction.ForkingPickler if finds_main else _WithoutMain)
    except _CannotFindError as error:
        raise RuntimeError(f"{error}, or pass {ways}" if ways else str(error)) from None
    except _ERRORS as error:
        module = _cloudpickle()
        if module is None:
            remedy = "use functions and classes of modules, or install cloudpickle (pip install cloudpickle)"
            error.add_note(_note("what worker processes are sent is pickled", remedy, ways))
            raise
        try:
            return dump(functools.partial(_by_cloudpickle, module, finds_main, last))
        except _ERRORS as again:
            error.add_note(_explanation(last, again, ways))
        raise


def _explanation(last: collections.deque[object], again: BaseException, ways: str) -> str:
    thing = last.pop() if last else None
    kind = thing if isinstance(thing, (type, FunctionType)) else type(thing)
    what = f"{shown(kind, 200)} cannot be pickled for worker processes, nor by cloudpickle ({again})"
    if kind.__module__ == "multiprocessing.synchronize":
        return _note(what, "make it with multiprocessing.get_context('spawn')", ways)
    return _note(what, "let each worker make its own, at the first use", ways)


def _note(what: str, remedy: str, ways: str) -> str:
    return f"{what}: {remedy}" + (f", or pass {ways}" if ways else "")


class _CannotFindError(Exception):
    """A process would not find something of the main module."""


class _WithoutMain(reduction.ForkingPickler):
    """A pickler for processes that cannot run the main module again."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__":
            raise _CannotFindError(
                f"workers that do not fork cannot find {thing.__qualname__} of the main module, which they "
                "cannot run again (a notebook, an interactive session, python -c or python -m package). Put "
                "it into a module and import it (in a notebook: %%writefile data.py), or install cloudpickle "
                "(pip install cloudpickle)"
            )
        return NotImplemented


def _is_found_by_name(thing: Any) -> bool:
    """True for a class or function of the main module that a process with this main module finds."""
    found = sys.modules["__main__"]
    if not isinstance(thing, (type, FunctionType)) or thing.__module__ != "__main__":
        return False
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)  # type: ignore[assignment]
    return found is thing


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def reducers_of(pickler: Any) -> dict[Any, Callable[[Any], Any]]:
    """Returns the reducers of a class of cloudpickle's, without reducers that send a copy of another kind."""
    return {kind: reduce for kind, reduce in pickler.dispatch_table.items() if kind not in _COPIED}


def _by_cloudpickle(
    module: Any, finds_main: bool, last: collections.deque[object], file: IO[bytes]
) -> pickle.Pickler:
    ours = reduction.ForkingPickler(file).dispatch_table

    class Pickler(module.Pickler):  # type: ignore[misc]
        # The table of cloudpickle's class hides the attribute that a pickler reads.
        dispatch_table = vars(pickle.Pickler)["dispatch_table"]

        def reducer_override(self, thing: Any) -> Any:
            if finds_main and _is_found_by_name(thing):
                return NotImplemented
            return super().reducer_override(thing)

        def persistent_id(self, thing: Any) -> None:
            # Called for each object: the last one is the one that cannot be pickled.
            last.append(thing)

    pickler: pickle.Pickler = Pickler(file, pickle.DEFAULT_PROTOCOL)
    pickler.dispatch_table = {**reducers_of(module.Pickler), **ours}
    return pickler
