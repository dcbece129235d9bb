"""Processes of a bench: calls in new ones, and the memory of one and its workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ringloader._common import proc
from ringloader._tools.bench.arguments import RunError, TargetError, line_of, users_traceback

# Imported by the first iterator of a program, once.
_PRELOADED = [
    "ringloader._core.with_workers",
    "ringloader._core.without_workers",
    "ringloader._features.on_error.collecting",
    "ringloader._features.on_error.handling",
    "ringloader._core.make_transport",
    "ringloader._worker.collate",
]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a new process, and waits for its end.

    The process is a copy of one that has only imported torch and ringloader. Loaders start workers there as
    they do in the program. What it prints is not shown.

    Raises:
        TargetError: As the function.
        RunError: If the function raises anything else, or the process dies.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([function.__module__, *_PRELOADED])
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        ours, theirs = context.Pipe(duplex=False)
        default = multiprocessing.get_start_method()
        process = context.Process(target=_serve, args=(theirs, printed.name, default, function, arguments))
        try:
            process.start()
            theirs.close()
            connection.wait([ours, process.sentinel])
            # A process that has died leaves an end of file.
            failure, result = None, None
            with contextlib.suppress(EOFError):
                failure, result = ours.recv() if ours.poll() else (None, None)
            process.join()
        except BaseException:
            if process.pid is not None:
                for pid in tree(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.join()
            raise
        finally:
            ours.close()
        if failure is not None:
            raise failure
        if result is None:
            raise RunError(f"its process {_end(process.exitcode or 0)}", printed.read())
    return result[0]


def _serve(
    channel: connection.Connection,
    printed: str,
    start_method: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # At an interrupt the command ends this process, with its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(printed).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method(start_method, force=True)
    failure: Exception | None = None
    result = None
    try:
        result = (function(*arguments),)
    except TargetError as error:
        failure = error
    except Exception as error:
        failure = RunError(line_of(error), users_traceback(error))
    channel.send((failure, result))
    # Threads of the user's code would be waited for.
    os._exit(0)


def _end(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    return f"was killed by signal {-exitcode} ({signal.strsignal(-exitcode)})"


def memory_of_tree() -> int | None:
    """Returns the bytes of this process and all below it, or None where the system does not tell.

    That is their proportional memory (PSS), and files of shared memory that are open but not mapped: those of
    torch's batches that are on their way.
    """
    try:
        total = 0
        mapped: set[tuple[int, int]] = set()
        files: dict[tuple[int, int], int] = {}
        for pid in tree(os.getpid()):
            total += _sizes(pid)["Pss"]
            mapped.update(_mapped_files(pid))
            files.update(_open_shared_memory(pid))
    except (OSError, KeyError):
        return None
    return total + sum(size for file, size in files.items() if file not in mapped)


def tree(root: int) -> list[int]:
    """Returns a process and all below it; without ``/proc`` nothing but the process."""
    children: dict[int, list[int]] = {}
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        fields = proc.stat_of(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _sizes(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}


def _mapped_files(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, minor = device.split(":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _open_shared_memory(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(("/dev/shm/", "/memfd:")):
                status = descriptor.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512
        except FileNotFoundError:
            # Closed between the listing and the look.
            continue
