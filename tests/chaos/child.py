"""The program of one case: `python -m chaos.child NAME LOADER FOLDER`."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from chaos.all import CASES
from chaos.case import Program, Skip


def said(folder: Path, **result: Any) -> None:
    made = folder / "result.new"
    made.write_text(json.dumps(result))
    made.replace(folder / "result")


def note_forks(folder: Path) -> None:
    """Has every forked process say which it is: one may have ended before the judge looks."""

    def note() -> None:
        # None may be free, or the judge may be gone.
        with contextlib.suppress(OSError):
            fd = os.open(folder / "forked", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, f"{os.getpid()}\n".encode())
            finally:
                os.close(fd)

    os.register_at_fork(after_in_child=note)


def main(name: str, loader: str, folder: Path) -> None:
    # A shell starts background programs with SIGINT ignored, and nohup with SIGHUP ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Python's default since 3.14 is forkserver.
    multiprocessing.set_start_method("fork", force=True)
    chosen = CASES[name]
    note_forks(folder)
    # A hang says where.
    faulthandler.dump_traceback_later(chosen.limit - 8, exit=False)
    program = Program(loader == "ringloader", chosen.method, folder)
    Path(folder / "began").touch()
    try:
        chosen.run(program)
    except Skip as reason:
        said(folder, status="skipped", why=str(reason))
    except Exception as error:
        traceback.print_exc()
        said(folder, status="wrong", why=f"{type(error).__name__}: {error}"[:400])
    else:
        said(folder, status="ok", figure=program.figure)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
