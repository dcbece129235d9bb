"""Names of the main module that worker processes could not find, said before these start.

A process that is not forked runs the file of the main module again. A notebook, an interactive session and
``python -c`` have no such file, so a worker has none of their classes and functions. It needs none for what
is imported from elsewhere, or pickled by value, as cloudpickle does it where it is installed.
"""

from __future__ import annotations

import io
import os
import pickletools
import sys
from collections.abc import Iterator
from multiprocessing import process
from typing import Any

from ringloader._start import pickled, processes

# The name of the module as a string of a pickle, from protocol 4 on, which multiprocessing has.
_MARK = b"\x8c\x08__main__"


class Look:
    """Looks through pickles for a context whose processes have nothing of the main module.

    Args:
        method: The start method.
        main: The kind of main module that it is, for people.
        others: Other ways to have workers, for people.
    """

    def __init__(self, method: str, main: str, others: str) -> None:
        self._method = method
        self._main = main
        self._others = others

    def __call__(self, data: Any) -> None:
        """Looks through a pickle.

        Args:
            data: Bytes, or a file that is mapped, from its beginning.

        Raises:
            RuntimeError: If it refers to classes or functions of the main module.
        """
        if data.find(_MARK) < 0:
            return
        names = sorted(set(_names(data)))
        if names:
            they = "it" if len(names) == 1 else "them"
            raise RuntimeError(
                f"workers of the start method {self._method!r} cannot find {', '.join(names)} of the main "
                f"module, {self._main}. Put {they} into a module and import it (in a notebook: %%writefile "
                f"data.py), install cloudpickle (pip install ringloader[cloudpickle]), or {self._others}"
            )


def look_for(context: Any, fork: str = "multiprocessing_context='fork'") -> Look | None:
    """Returns what looks through the pickles for processes of a context; None if they find all names.

    Args:
        context: The ``multiprocessing`` context that starts them.
        fork: The argument by which they would be forked.

    Raises:
        RuntimeError: If no process can start, because each would run a file that is not there.
    """
    method = context.get_start_method()
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if method == "fork" or (name is not None and name.rpartition(".")[2] != "__main__"):
        return None
    others = f"pass {fork}, worker_method='thread' or num_workers=0"
    file = getattr(main, "__file__", None) if name is None else None
    if file is not None:
        if _is_standard_input(file):
            raise RuntimeError(
                f"workers of the start method {method!r} run the main module again, which came from standard "
                f"input: there is no file {file!r}. Put the program into a file, or {others}"
            )
        return None
    if not pickled.pickles_as_usual() or (method == "forkserver" and processes.is_preload_the_programs()):
        # Others may pickle it by value; what the server imports may have put names into the main module.
        return None
    if name is None:
        return Look(
            method, "a notebook, an interactive session or python -c, which they cannot run again", others
        )
    # MIRRORS multiprocessing spawn.py::_fixup_main_from_name.
    return Look(method, "the __main__ of a package, folder or zip file, which they do not run again", others)


def _is_standard_input(file: str) -> bool:
    path = os.path.join(process.ORIGINAL_DIR or "", file)  # type: ignore[attr-defined]  # noqa: PTH118
    return file.startswith("<") and not os.path.exists(path)  # noqa: PTH110


def _names(data: Any) -> Iterator[str]:
    """Yields the names with which a pickle refers to the main module. Unpickles nothing."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    memo: dict[int, str | None] = {}
    module = last = None
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        operation = opcode.name
        if operation == "MEMOIZE":
            memo[len(memo)] = last
        elif operation == "STACK_GLOBAL":
            if module == "__main__" and last is not None:
                yield last
            last = None
        elif operation.endswith("BINGET"):
            module, last = last, memo.get(argument)
        elif operation not in ("PROTO", "FRAME"):
            module, last = last, argument if isinstance(argument, str) else None
