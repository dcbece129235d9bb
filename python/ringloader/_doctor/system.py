"""The limits that the system sets a loader: processes, descriptors, memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import ringloader._native as _native
from ringloader._doctor.diagnosis import Finding
from ringloader._transport import budget

# Descriptors that the main process has for each worker, with ringloader's transport.
_FDS_PER_WORKER = 5
_MIB = 1 << 20


def findings() -> Iterator[Finding]:
    """Yields the findings, in the order in which they are printed."""
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield _cores()
    yield from _start_methods()
    if _native.SUPPORTED:
        yield _handles()
        yield _memory()
    yield from _limits()
    yield from _kernel()


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    there = os.cpu_count() or allowed
    if allowed == there:
        return Finding("cores", str(there))
    meaning = f"This process may use {allowed} of them: more workers than that share them."
    return Finding("cores", f"{allowed} of {there}", "note", meaning)


def _start_methods() -> Iterator[Finding]:
    methods, default = multiprocessing.get_all_start_methods(), multiprocessing.get_start_method(True)
    chosen = default or f"{methods[0]}, which nothing has chosen yet"
    meaning = ""
    if (default or methods[0]) != "fork":
        meaning = (
            "Workers of this method import the program's main file, which needs the guard "
            '`if __name__ == "__main__":`, and get the dataset pickled.'
        )
    value = f"{', '.join(methods)}; the default is {chosen}"
    yield Finding("start methods", value, "note" if meaning else "ok", meaning)


def _handles() -> Finding:
    """Tells if the kernel, or a container's filter of system calls, has what the transport needs."""
    missing = []
    for name, make in _MAKERS.items():
        try:
            os.close(make())
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
        except AttributeError:
            # Not in this Python; the native side calls it without.
            continue
    if not missing:
        return Finding("system calls", "memfd_create, pidfd_open and eventfd work")
    return Finding(
        "system calls",
        f"not to be had: {', '.join(missing)}",
        "problem",
        "Batches travel by torch's own transport. In a container, its seccomp profile may forbid them.",
    )


def _make_memfd() -> int:
    return os.memfd_create("ringloader-doctor", os.MFD_CLOEXEC)


def _make_pidfd() -> int:
    return os.pidfd_open(os.getpid())


def _make_eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC)


_MAKERS = {"memfd_create": _make_memfd, "pidfd_open": _make_pidfd, "eventfd": _make_eventfd}


def _memory() -> Finding:
    left = _native.available_memory()
    share = budget.share_per_worker(1, None, left)
    value = f"{left // _MIB} MiB left; loaders take up to {share // _MIB} MiB each for batches on their way"
    if left >= 512 * _MIB:
        return Finding("memory", value)
    return Finding(
        "memory",
        value,
        "note",
        "That is the least of the machine's memory and of the limits of its control groups. Large batches "
        "may find none: use fewer workers, a smaller batch_size, or a higher limit.",
    )


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = _open_files()
    room = max(soft - opened, 0) // _FDS_PER_WORKER if soft != resource.RLIM_INFINITY else None
    if room is None:
        yield Finding("open files", f"{opened}, no limit")
    else:
        value = f"{opened} of {soft}: room for about {room} workers"
        meaning = ""
        if room < 64:
            most = "more" if hard == resource.RLIM_INFINITY else str(hard)
            meaning = f"More workers need a higher limit: `ulimit -n`, which may be raised to {most}."
        yield Finding("open files", value, "problem" if room < 1 else "note" if meaning else "ok", meaning)
    for name, limit, meaning in _OTHER_LIMITS:
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            yield Finding(name, f"at most {soft // _MIB} MiB", "note", meaning)


_OTHER_LIMITS = (
    (
        "address space",
        resource.RLIMIT_AS,
        "ringloader reserves address space beyond the memory that it uses. Under this limit (`ulimit -v`) "
        "its windows are smaller, and where there is no room, batches travel by torch's own transport.",
    ),
    (
        "file size",
        resource.RLIMIT_FSIZE,
        "Shared memory counts as a file: larger ones are refused (`ulimit -f`), and batches travel by "
        "torch's own transport.",
    ),
    (
        "locked memory",
        resource.RLIMIT_MEMLOCK,
        "It bounds (`ulimit -l`) what a device's driver may register in place; beyond it, large tensors are "
        "copied once more. It means nothing without a device.",
    ),
)


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        return 0


def _kernel() -> Iterator[Finding]:
    overcommit = _read("/proc/sys/vm/overcommit_memory")
    if overcommit == "2":
        yield Finding(
            "overcommit",
            "vm.overcommit_memory=2",
            "note",
            "The kernel counts what is reserved, not what is used: it may refuse to fork a large process, "
            "and to make arrays that would never be touched.",
        )
    with contextlib.suppress(OSError, AttributeError):
        of_shm = os.statvfs("/dev/shm")
        size = of_shm.f_frsize * of_shm.f_blocks
        small = size < 64 * _MIB + 1
        meaning = "ringloader's batches do not lie there; those of torch's own transport do." if small else ""
        yield Finding("/dev/shm", f"{size // _MIB} MiB", "note" if small else "ok", meaning)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
