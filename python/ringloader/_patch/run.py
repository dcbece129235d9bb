"""Runs a program as ``python program`` and ``python -m module`` do, in this process."""

from __future__ import annotations

import os.path
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from typing import Any

_MAIN = "__main__"
# The name of the main module in children that run it again. MIRRORS multiprocessing __init__.py.
_IN_CHILDREN = "__mp_main__"


class _ProgramsMain(types.ModuleType):
    """Finds objects of the program's classes, which come back from its children by the name above."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_MAIN], name)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file, or a folder or zip file with a ``__main__.py``.

    Raises:
        OSError: When the file cannot be read.
        SystemExit: As the program; or when a folder has nothing to run.
    """
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        # `python -m` has put the current folder there. runpy puts a folder or zip file there itself.
        is_file = not (os.path.isdir(script) or zipfile.is_zipfile(script))  # noqa: PTH112
        sys.path[:1] = [os.path.dirname(os.path.realpath(script))] if is_file else []  # noqa: PTH120
    # Tracebacks have the full name, as under Python.
    _run(runpy.run_path, os.path.abspath(script), run_name=_MAIN)  # noqa: PTH100


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module, or the ``__main__`` of a package.

    Raises:
        SystemExit: As the program; or when there is no such module.
    """
    sys.argv[:] = ["-m", *arguments]
    _run(runpy.run_module, name, run_name=_MAIN, alter_sys=True)


def _run(run: Any, program: str, **how: Any) -> None:
    sys.modules[_IN_CHILDREN] = _ProgramsMain(_IN_CHILDREN)
    try:
        run(program, **how)
    except ImportError as error:
        last: Any = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        if last.tb_frame.f_globals.get("__name__") != runpy.__name__:
            raise
        # The program has not begun: there is none.
        sys.exit(f"{sys.executable}: {error}")
