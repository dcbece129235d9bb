"""Runs a program as ``python program`` and ``python -m module`` do, in this process."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os.path
import sys
import types
import zipfile
from collections.abc import Sequence
from typing import Any

# The name of the main module in children that run it again. MIRRORS multiprocessing __init__.py.
_IN_CHILDREN = "__mp_main__"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file, or a folder or zip file with a ``__main__.py``.

    Raises:
        OSError: When the file cannot be read.
        SystemExit: As the program; or when a folder has nothing to run.
    """
    sys.argv[:] = [script, *arguments]
    if os.path.isdir(script) or zipfile.is_zipfile(script):  # noqa: PTH112
        full = os.path.abspath(script)  # noqa: PTH100
        _set_first_path(full, also_if_safe=True)
        found = importlib.machinery.PathFinder.find_spec("__main__", [full])
        if found is None:
            sys.exit(f"{sys.executable}: can't find '__main__' module in {script!r}")
        _run_found(found)
        return
    # Since 3.9 a program's own file has its full name in tracebacks too; sys.argv has what was given.
    full = os.path.abspath(script)  # noqa: PTH100
    with io.open_code(full) as file:
        source = file.read()
    _set_first_path(os.path.dirname(os.path.realpath(script)))  # noqa: PTH120
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    module = _new_main(full, loader, None)
    exec(compile(source, full, "exec", dont_inherit=True), module.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module, or the ``__main__`` of a package.

    Raises:
        SystemExit: As the program; or when there is no such module.
    """
    sys.argv[:] = ["-m", *arguments]
    found = _find(name)
    if found is not None and found.submodule_search_locations is not None:
        found = _find(f"{name}.__main__")
        if found is None:
            sys.exit(f"{sys.executable}: {name!r} is a package and has no __main__")
    if found is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = found.origin or name
    _run_found(found)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _run_found(found: Any) -> None:
    code = found.loader.get_code(found.name)
    if code is None:
        sys.exit(f"{sys.executable}: No code object available for {found.name}")
    module = _new_main(found.origin, found.loader, found.cached)
    # Spawned children find the program again by these.
    module.__spec__ = found
    module.__package__ = found.parent
    exec(code, module.__dict__)


def _new_main(file: str | None, loader: object, cached: str | None) -> types.ModuleType:
    """The ``__main__`` of a program that starts, for as long as the process lives."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=file, __loader__=loader, __builtins__=builtins)
    # Python 3.15 has it no more.
    if sys.version_info < (3, 15):
        vars(module)["__cached__"] = cached
    sys.modules["__main__"] = module
    if _IN_CHILDREN in sys.modules:
        # multiprocessing was imported before. Objects of the program's classes come back by this name.
        sys.modules[_IN_CHILDREN] = module
    return module


def _set_first_path(folder: str, *, also_if_safe: bool = False) -> None:
    """Puts a folder in place of the current one, which ``python -m`` has put there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif also_if_safe:
        sys.path.insert(0, folder)
