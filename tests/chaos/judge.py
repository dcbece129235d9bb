"""Runs the program of a case, watches it, and says how it went."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from chaos.case import Case
from faults.proc import command_line, is_running, names_in_dev_shm
from programs import client

TESTS = Path(__file__).resolve().parent.parent
_MARK = "RINGLOADER_CHAOS_MARK"


@dataclass(frozen=True)
class Result:
    case: str
    loader: str
    status: str
    """`ok`, `wrong`, `hang`, `crash`, `leftover`, `skipped`; `known`: ringloader fails it so, and says so."""
    seconds: float
    figure: str
    why: str
    err: str = ""


def _of(mark: str, session: int) -> set[int]:
    """Running processes of the program: those of its session, and those that have its environment."""
    wanted = f"{_MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            in_session = int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session
            if (in_session or wanted in (entry / "environ").read_bytes()) and is_running(int(entry.name)):
                found.add(int(entry.name))
    return found


def _end(mark: str, session: int) -> None:
    """Kills what is left of the program, and nothing else."""
    deadline = time.monotonic() + 5
    while (left := _of(mark, session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _signal_of(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)


def run(case: Case, loader: str) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="chaos."))
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        # Two at a time, and their workers, share the machine.
        "OMP_NUM_THREADS": "1",
    }
    named = names_in_dev_shm()
    seen: set[int] = set()
    began, wall = time.monotonic(), time.time()
    with (folder / "err").open("wb") as err, (folder / "out").open("wb") as out:
        process = client.start(
            ["-m", "chaos.child", case.name, loader, str(folder)],
            env=environment,
            variables={_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    code: int | None = None
    try:
        while time.monotonic() < began + case.limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                break
            seen |= _of(mark, process.pid)
        ended = time.monotonic()
        left: set[int] = set()
        if code is not None:
            while (left := _of(mark, process.pid)) and time.monotonic() < ended + case.grace:
                seen |= left
                time.sleep(0.02)
        gone = time.monotonic() - ended
        # The command lines must be read before the processes are gone.
        lines = [f"{pid} {command_line(pid)[-60:]}" for pid in sorted(left)]
    finally:
        _end(mark, process.pid)
        process.wait()
    seen.add(process.pid)
    mine = {str(pid) for pid in seen}
    with contextlib.suppress(OSError):
        mine |= set((folder / "forked").read_text().split())
    shm = [name for name in names_in_dev_shm() - named if mine & set(name.replace("-", "_").split("_"))]
    for name in shm:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    error = (folder / "err").read_text(errors="replace")
    start = began
    with contextlib.suppress(OSError):
        # The time for imports says nothing.
        start += max(0.0, (folder / "began").stat().st_mtime - wall)
    said = {}
    with contextlib.suppress(OSError, ValueError):
        said = json.loads((folder / "result").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    seconds = ended - start

    def result(status: str, why: str = "") -> Result:
        if case.known is not None and loader == "ringloader" and status == case.known[0]:
            status, why = "known", f"{case.known[1]} ({status}: {why})"
        figure = said.get("figure") or (f"{gone:.2f} s" if case.ends < 0 else f"{seconds:.1f} s in all")
        return Result(case.name, loader, status, round(seconds, 2), figure, why, error[-4000:])

    if said.get("status") in ("skipped", "wrong"):
        return result(said["status"], said["why"])
    if code is None:
        return result("hang", f"after {case.limit:g} s" + (" (at its exit)" if said else ""))
    if code != case.ends:
        if code < 0:
            return result("crash", f"ended by {_signal_of(code)}")
        return result("wrong", f"exit code {code}: {error.strip()[-200:]}")
    if case.tracebacks is not None and (count := error.count("Traceback (most recent")) != case.tracebacks:
        return result("wrong", f"{count} tracebacks, and {case.tracebacks} are due")
    if left:
        return result(
            "leftover", f"{len(left)} processes {gone:.1f} s after the end: {'; '.join(lines)[:200]}"
        )
    if shm:
        return result("leftover", f"{len(shm)} names in /dev/shm")
    return result("ok")
