"""The error for a main file without the guard ``if __name__ == "__main__":``, in a worker and in its parent.

A process that is not forked runs the main file again before it has anything of its parent's. Where the file
comes to a loader with workers there, the worker ends with an exit code of its own, by which the parent knows.
With Python 3.14 it may be the fork server that runs the file, before any worker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver, util
from multiprocessing.process import current_process
from typing import Any

# Of a process that found no guard. No shell, signal or library has it.
EXIT_CODE = 167
# multiprocessing's name for the main module where it is run again.
_AGAIN = "__mp_main__"
# A loader's argument for workers that fork.
FORK = "multiprocessing_context='fork'"
# Seconds in which a fork server that has closed its connections ends.
_ENDS_WITHIN = 2.0


def refuse_in_import(context: Any) -> None:
    """Ends this process if it is a worker-to-be that runs the main file again, and would start workers.

    The parent raises the whole error: it came to the same line.

    Args:
        context: The ``multiprocessing`` context that would start them.
    """
    if not hasattr(current_process(), "_inheriting") or context.get_start_method() == "fork":
        return
    place = _place_in_main()
    if place is None:
        return
    file, line = place
    try:
        sys.stderr.write(
            f"ringloader: line {line} of {file} starts workers while it is run again for a worker; "
            'it needs the guard `if __name__ == "__main__":`\n'
        )
        # First: in a worker of the server for `spawn` it runs the others.
        util._exit_function()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(EXIT_CODE)


def is_missing(method: str, exitcode: int | None) -> bool:
    """True if a process has ended because the main file has no guard."""
    return exitcode == EXIT_CODE and method != "fork"


def error_of(method: str, fork: str = FORK) -> RuntimeError:
    """Returns the parent's error for a process that has ended because the main file has no guard."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or "the main module"
    return RuntimeError(
        f"workers of the start method {method!r} run the main file again, and {file} starts workers "
        "each time that it is run. Put what the program does into a function, and call it under the guard\n\n"
        '    if __name__ == "__main__":\n'
        "        main()\n\n"
        f"or pass {fork}"
    )


@contextlib.contextmanager
def explaining_missing_guard(context: Any, fork: str = FORK) -> Iterator[None]:
    """Raises our error where a block starts a process, and the fork server has ended without a guard.

    Args:
        context: The ``multiprocessing`` context of the process.
        fork: The argument by which it would be forked.

    Raises:
        RuntimeError: In place of the error of the connection to that server.
    """
    try:
        yield
    except (OSError, EOFError):
        if context.get_start_method() == "forkserver" and _exit_code_of_server() == EXIT_CODE:
            raise error_of("forkserver", fork) from None
        raise


def _place_in_main() -> tuple[str, int] | None:
    """Returns the main file and the line at which it stands while it is run again; None if it is not."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _AGAIN and frame.f_code.co_name == "<module>":
            return frame.f_code.co_filename, frame.f_lineno
    return None


def _exit_code_of_server() -> int | None:
    """Returns the exit code of multiprocessing's fork server, which stays to be waited for."""
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    until = time.monotonic() + _ENDS_WITHIN
    while pid is not None:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            return None
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else None
        if time.monotonic() > until:
            return None
        time.sleep(0.01)
    return None
