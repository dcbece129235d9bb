"""``doctor()``: software and limits of this machine, for a bug report, and the rates of a test loader."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
import torch.utils.data

import ringloader._native as _native
from ringloader._features import cores
from ringloader._features.report import report
from ringloader._torch import devices, hook, internals, modes, select_path
from ringloader.dataloader import DataLoader

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The test loader's.
_BATCHES = 400
_WORKERS = 2
# Seconds for a worker that never answers.
_TIMEOUT = 30.0

_WIDTH = 100
Verdict = Literal["ok", "note", "problem"]

# Descriptors that the main process has for each worker, with ringloader's transport.
_FDS_PER_WORKER = 5
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check of ``doctor()``.

    Attributes:
        subject: The name of the check, such as ``"open files"``.
        value: The result, as text.
        verdict: ``"ok"``; ``"note"``: worth knowing; ``"problem"``: loaders fail, or cannot use shared
            memory.
        meaning: The consequence, and what to change; empty if there is none.
    """

    subject: str
    value: str
    verdict: Verdict = "ok"
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of ``ringloader.doctor()``. ``print`` it, and paste it into a bug report.

    Attributes:
        findings: In the order in which they are printed.
    """

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings with which loaders fail, or leave the native path."""
        return tuple(one for one in self.findings if one.verdict == "problem")

    # The text that a prompt and a notebook show, and that `str` gives.
    def __repr__(self) -> str:
        widest = max((len(one.subject) for one in self.findings), default=0)
        return "\n".join(line for one in self.findings for line in _lines(one, widest))


def _lines(finding: Finding, widest: int) -> Iterator[str]:
    mark = "" if finding.verdict == "ok" else f"{finding.verdict}: "
    yield f"{finding.subject:<{widest}}  {finding.value}"
    if finding.meaning:
        indent = " " * (widest + 2)
        yield from textwrap.wrap(
            mark + finding.meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent
        )


def doctor(*, rate: bool = True) -> Diagnosis:
    """Checks this machine, this Python and this torch for anything that would stop or slow down a loader.

    Checks versions, the limits on processes, descriptors and memory, and each reason why a loader cannot use
    shared memory. Then it compares a test loader with torch's. ``python -m ringloader doctor`` prints the
    same. Nothing changes, and this process draws no random numbers.

    Args:
        rate: True to run the test loader, which starts worker processes and takes a few seconds.

    Returns:
        The findings. Paste their ``str`` into a bug report.
    """
    found = [*findings()]
    if rate:
        # A default device, or another mode of the program's, is not the machine's.
        with modes.without_modes():
            found.append(_rate())
    return Diagnosis(tuple(found))


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
    current = devices.current_accelerator()
    if current is not None and devices.is_in_bad_fork(current.type):
        return Finding(
            "accelerator",
            f"{current.type}, initialised before this process was forked",
            "note",
            "It cannot be used in this process.",
        )
    if not torch.accelerator.is_available():
        return Finding("accelerator", "none")
    return Finding("accelerator", f"{current}, {torch.accelerator.device_count()} of them")


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
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    return Finding("environment", ", ".join(f"{name}={os.environ[name]}" for name in names) or "nothing set")


# The variables that docs/options.md lists begin so.
_VARIABLES = ("RINGLOADER", "GLIBC_TUNABLES", "LOCAL_WORLD_SIZE", "MALLOC_")


def _cores() -> Finding:
    allowed, most = cores.cores(), cores.cpu_quota()
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
    if not missing:
        return Finding("system calls", "memfd_create, pidfd_open and eventfd work")
    return Finding(
        "system calls",
        f"not available: {', '.join(missing)}",
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
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", f"{opened}, no limit")
    room = max(soft - opened, 0) // _FDS_PER_WORKER
    value = f"{opened} of {soft}: room for about {room} workers"
    if room >= 64:
        return Finding("open files", value)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
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


def _rate() -> Finding:
    """Checks that workers start and batches arrive: the rates of both loaders, each with its own workers."""
    ours, we_run = _tried(DataLoader)
    torchs, they_run = _tried(_TorchsLoader)
    verdict, meaning = _OF_TRIALS[we_run, they_run]
    return Finding(f"test loader, {_WORKERS} workers", f"{ours}; torch's: {torchs}", verdict, meaning)


# By whether ringloader's loader has run, and torch's.
_OF_TRIALS: dict[tuple[bool, bool], tuple[Verdict, str]] = {
    (True, True): ("ok", ""),
    (True, False): ("note", "torch's loader with workers does not run here, and ringloader's does."),
    (False, True): (
        "problem",
        "ringloader's loader with workers does not run here, and torch's does: set RINGLOADER=off.",
    ),
    (False, False): ("problem", "A loader with workers does not run here."),
}


def _tried(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> tuple[str, bool]:
    """Returns the rate of a loader or its error, and if it has run."""
    try:
        # A generator of its own: torch draws from it, and not from the program's.
        made: Any = cls(
            _Rows(), batch_size=4, num_workers=_WORKERS, timeout=_TIMEOUT, generator=torch.Generator()
        )
        rate = f"{_batches_per_second(made):.0f}"
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    if cls is _TorchsLoader:
        return rate, True
    return f"{rate} batches of 1 KiB a second on path {report.report(made).path}", True


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A sample costs next to nothing, so the rate is the loader's."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))

    def __len__(self) -> int:
        return 4 * _BATCHES


class _TorchsLoader(torch.utils.data.DataLoader[torch.Tensor]):
    def _get_iterator(self) -> Any:
        # Also while install() is in effect.
        return hook.beneath(internals.Loader._get_iterator)(self)


def _batches_per_second(loader: TorchLoader) -> float:
    batches = iter(loader)
    # The workers' start is not counted.
    next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return count / (time.perf_counter() - start)
