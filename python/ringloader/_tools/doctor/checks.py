"""The checks of ``doctor()``: installed software, and the limits that the system sets a loader."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy
import torch
import torch.utils.data

import ringloader._native as _native
from ringloader._common import proc
from ringloader._torch import devices, hook, internals, select_path

Verdict = Literal["ok", "note", "problem"]

# Descriptors that the main process has for each worker, with ringloader's transport.
_FDS_PER_WORKER = 5
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check of ``doctor()``.

    Attributes:
        subject: The name of the check, as ``"open files"``.
        value: The result, as text.
        verdict: ``"ok"``; ``"note"``: worth knowing; ``"problem"``: loaders fail, or leave the native path.
        meaning: The consequence, and what to change; empty if there is none.
    """

    subject: str
    value: str
    verdict: Verdict = "ok"
    meaning: str = ""


def findings() -> Iterator[Finding]:
    """Yields the findings, in the order in which they are printed."""
    yield Finding("ringloader", _version("ringloader"))
    yield Finding("python", f"{platform.python_implementation()} {platform.python_version()}{_build()}")
    yield Finding("torch", torch.__version__)
    yield Finding("numpy", numpy.__version__)
    yield from _guarded("accelerator", _accelerator)
    yield from _guarded("path", _path)
    yield Finding("install()", "not in effect" if hook.current() is None else "in effect")
    yield _environment()
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield from _guarded("cores", _cores)
    yield _start_methods()
    if _native.SUPPORTED:
        yield from _guarded("system calls", _handles)
        yield from _guarded("memory", _memory)
        yield from _given_back()
        yield from _guarded("open files", _open_files)
        yield from _limits()
        yield from _overcommit()
        yield _shared_memory()


def _guarded(subject: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    """Yields the finding of a check, or its error: a driver, or a replaced part of torch, may raise any."""
    try:
        yield check()
    except Exception as error:
        yield Finding(subject, f"{type(error).__name__}: {error}", "problem", "This check has failed.")


def _noted(subject: str, value: str, meaning: str) -> Finding:
    """Returns a finding that is worth knowing if there is a meaning to it."""
    return Finding(subject, value, "note" if meaning else "ok", meaning)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _build() -> str:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "" if with_lock else ", without the interpreter lock"


def _accelerator() -> Finding:
    bad = devices.device_in_bad_fork()
    if bad is not None:
        return Finding(
            "accelerator",
            f"{bad}, initialised before this process was forked",
            "note",
            "It cannot be used in this process.",
        )
    if not torch.accelerator.is_available():
        return Finding("accelerator", "none")
    device = torch.accelerator.current_accelerator()
    return Finding("accelerator", f"{device}, {torch.accelerator.device_count()} of them")


def _path() -> Finding:
    """Returns the path that a plain loader with workers would take."""
    if not _native.SUPPORTED:
        return Finding(
            "path",
            "torch",
            "problem" if sys.platform == "linux" else "note",
            "It has no shared-memory rings, which need Linux: loaders with workers are torch's.",
        )
    try:
        reason = select_path.reason_of_user()
    except ValueError as error:
        return Finding("path", "none", "problem", f"No loader can be iterated: {error}.")
    if reason is not None:
        return Finding("path", "torch", "note", f"{reason.text}: torch's own loader runs.")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(1)), num_workers=1)
    reason = select_path.reason_for_torch(loader, hook.beneath(internals.Loader._get_iterator))
    if reason is not None:
        return Finding("path", "torch", "problem", f"{reason.text}: torch's own loader runs.")
    return Finding("path", "native")


def _environment() -> Finding:
    names = sorted(name for name in os.environ if name.startswith("RINGLOADER_") or name in _OTHERS)
    return Finding("environment", ", ".join(f"{name}={os.environ[name]}" for name in names) or "nothing set")


# Variables of other projects that docs/options.md lists.
_OTHERS = {
    select_path.SWITCH,
    "GLIBC_TUNABLES",
    "LOCAL_WORLD_SIZE",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
}


def _cores() -> Finding:
    allowed, most = proc.cores(), proc.cpu_quota()
    there = os.cpu_count() or allowed
    if allowed == there:
        return Finding("cores", str(there))
    why = "" if most is None or most > allowed else f" (the CPU quota of its control group is {most:g})"
    meaning = f"This process may use {allowed} of them{why}: more workers than that share them."
    return _noted("cores", f"{allowed} of {there}", meaning)


def _start_methods() -> Finding:
    methods, default = multiprocessing.get_all_start_methods(), multiprocessing.get_start_method(True)
    chosen = default or f"{methods[0]}, which nothing has chosen yet"
    meaning = ""
    if (default or methods[0]) != "fork":
        meaning = (
            "Workers of this method import the program's main file, which needs the guard "
            '`if __name__ == "__main__":`, and get the dataset pickled.'
        )
    return _noted("start methods", f"{', '.join(methods)}; the default is {chosen}", meaning)


def _handles() -> Finding:
    """Tells if the kernel, or a container's filter of system calls, has what the transport needs."""
    missing = []
    makers: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("ringloader-doctor", os.MFD_CLOEXEC),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
        "eventfd": lambda: os.eventfd(0, os.EFD_CLOEXEC),
    }
    for name, make in makers.items():
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


def _memory() -> Finding:
    from ringloader._transport import budget

    left = _native.available_memory()
    share = budget.share_per_worker(1, None, left)
    value = f"{left // _MIB} MiB left; loaders take up to {share // _MIB} MiB each for batches on their way"
    if left >= 512 * _MIB:
        return Finding("memory", value)
    meaning = (
        "That is the least of the machine's memory and of the limits of its control groups. Large batches "
        "may find none: use fewer workers, a smaller batch_size, or a higher limit."
    )
    return _noted("memory", value, meaning)


def _given_back() -> Iterator[Finding]:
    if not _native.takes_shared_memory_back():
        yield _noted(
            "shared memory",
            "not given back before a loader ends",
            "This system takes no pages of shared memory back (MADV_REMOVE): gVisor does not. A worker that "
            "has reached its part of max_shared_bytes sends larger batches more slowly: raise that option.",
        )


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        opened = 0
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", f"{opened}, no limit")
    room = max(soft - opened, 0) // _FDS_PER_WORKER
    value = f"{opened} of {soft}: room for about {room} workers"
    if room >= 64:
        return Finding("open files", value)
    most = "more" if hard == resource.RLIM_INFINITY else str(hard)
    meaning = f"More workers need a higher limit: `ulimit -n`, which may be raised to {most}."
    return Finding("open files", value, "note" if room else "problem", meaning)


def _limits() -> Iterator[Finding]:
    import resource

    for name, limit, meaning in _OTHER_LIMITS:
        soft = resource.getrlimit(getattr(resource, limit))[0]
        if soft != resource.RLIM_INFINITY:
            yield _noted(name, f"at most {soft // _MIB} MiB", meaning)


_OTHER_LIMITS = (
    (
        "address space",
        "RLIMIT_AS",
        "ringloader reserves address space beyond the memory that it uses. Under this limit (`ulimit -v`) "
        "its windows are smaller, and where there is no room, batches travel by torch's own transport.",
    ),
    (
        "file size",
        "RLIMIT_FSIZE",
        "Shared memory counts as a file: larger ones are refused (`ulimit -f`), and batches travel by "
        "torch's own transport.",
    ),
    (
        "locked memory",
        "RLIMIT_MEMLOCK",
        "It bounds (`ulimit -l`) what a device's driver may register in place; beyond it, large tensors are "
        "copied once more. It means nothing without a device.",
    ),
)


def _overcommit() -> Iterator[Finding]:
    overcommit = ""
    with contextlib.suppress(OSError):
        overcommit = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    if overcommit == "2":
        yield _noted(
            "overcommit",
            "vm.overcommit_memory=2",
            "The kernel counts what is reserved, not what is used: it may refuse to fork a large process, "
            "and to make arrays that would never be touched.",
        )


def _shared_memory() -> Finding:
    """Returns the size of the folder in which torch's batches lie."""
    theirs = "ringloader's batches do not lie there; those of torch's own transport do."
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return _noted("/dev/shm", f"not to be had ({error.strerror})", theirs)
    size = found.f_frsize * found.f_blocks
    value = f"{size // _MIB} MiB"
    if found.f_flag & os.ST_RDONLY:
        return _noted("/dev/shm", f"{value}, read-only", theirs)
    return _noted("/dev/shm", value, theirs if size < 64 * _MIB + 1 else "")
