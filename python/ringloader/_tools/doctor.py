"""``doctor()``: software and limits of this machine, for a bug report, and the rates of a test loader."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import torch
import torch.utils.data

import ringloader
import ringloader._native as _native
from ringloader._features import cores
from ringloader._features.report import report
from ringloader._torch import hook, internals, modes, select_path
from ringloader.dataloader import DataLoader

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The test loader's.
_BATCHES = 400
_WORKERS = 2

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

    Checks versions, the limits on processes, descriptors and memory, and the reasons why a loader cannot use
    shared memory. Then it compares a test loader with torch's. ``python -m ringloader doctor`` prints the
    same. Nothing changes, and this process draws no random numbers.

    Args:
        rate: True to run the test loader, which starts worker processes and takes a few seconds.

    Returns:
        The findings. Paste their ``str`` into a bug report.
    """
    return Diagnosis(tuple(findings(rate)))


def findings(rate: bool = False) -> Iterator[Finding]:
    """Yields the findings, in the order in which they are printed."""
    yield Finding("ringloader", getattr(ringloader, "__version__", "not installed as a package"))
    yield Finding("python", f"{platform.python_implementation()} {sys.version.partition('[')[0].strip()}")
    yield Finding("torch", torch.__version__)
    yield Finding("numpy", numpy.__version__)
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    given = ", ".join(f"{name}={os.environ[name]}" for name in names)
    yield Finding("environment", given or "nothing set")
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    checks: dict[str, Callable[[], _Found | None]]
    checks = {"accelerator": _accelerator, "path": _path, "cores": _cores, "start methods": _start_methods}
    if _native.SUPPORTED:
        checks |= {"memory": _memory, "shared memory": _given_back, "open files": _open_files}
        checks |= {"limits": _limits}
    if rate:
        checks[f"test loader, {_WORKERS} workers"] = _rate
    for subject, check in checks.items():
        try:
            found = check()
        # A driver, or a replaced part of torch, may raise any.
        except Exception as error:
            found = _Found(f"{type(error).__name__}: {error}", "problem", "This check has failed.")
        if found is not None:
            yield Finding(subject, *found)


# The variables that docs/options.md lists begin so.
_VARIABLES = ("RINGLOADER", "GLIBC_TUNABLES", "LOCAL_WORLD_SIZE", "MALLOC_")


class _Found(NamedTuple):
    """A finding without its subject."""

    value: str
    verdict: Verdict = "ok"
    meaning: str = ""


def _accelerator() -> _Found:
    if not torch.accelerator.is_available():
        return _Found("none")
    return _Found(f"{torch.accelerator.current_accelerator()}, {torch.accelerator.device_count()} of them")


def _path() -> _Found:
    """Returns the path that a plain loader with workers would take."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(1)), num_workers=1)
    reason = select_path.reason_of_user() or select_path.reason_for_torch(
        loader, hook.beneath(internals.Loader._get_iterator)
    )
    return _on_path("native", "native") if reason is None else _on_path("torch", "torch", reason.text)


def _on_path(value: str, path: str, reason: str = "") -> _Found:
    if path == "native":
        return _Found(value)
    is_meant = select_path.is_off() or sys.platform != "linux"
    return _Found(value, "note" if is_meant else "problem", f"{reason}: torch's own loader runs.")


def _cores() -> _Found:
    allowed, most = cores.cores(), cores.cpu_quota()
    there = os.cpu_count() or allowed
    if allowed == there:
        return _Found(str(there))
    why = "" if most is None or most > allowed else f" (the CPU quota of its control group is {most:g})"
    meaning = f"This process may use {allowed} of them{why}: more workers than that share them."
    return _Found(f"{allowed} of {there}", "note", meaning)


def _start_methods() -> _Found:
    methods, default = multiprocessing.get_all_start_methods(), multiprocessing.get_start_method(True)
    value = f"{', '.join(methods)}; the default is {default or f'{methods[0]}, which nothing has chosen yet'}"
    if (default or methods[0]) == "fork":
        return _Found(value)
    meaning = (
        "Workers of this method import the program's main file, which needs the guard "
        '`if __name__ == "__main__":`, and get the dataset pickled.'
    )
    return _Found(value, "note", meaning)


def _memory() -> _Found:
    from ringloader._transport import budget

    left = _native.available_memory()
    share = budget.share_per_worker(1, None, left)
    value = f"{left // _MIB} MiB left; loaders take up to {share // _MIB} MiB each for batches on their way"
    if left >= 512 * _MIB:
        return _Found(value)
    meaning = (
        "That is the least of the machine's memory and of the limits of its control groups. Large batches "
        "may find none: use fewer workers, a smaller batch_size, or a higher limit."
    )
    return _Found(value, "note", meaning)


def _given_back() -> _Found | None:
    if _native.takes_shared_memory_back():
        return None
    meaning = (
        "This system takes no pages of shared memory back (MADV_REMOVE): gVisor does not. A worker that "
        "has reached its part of max_shared_bytes sends larger batches more slowly: raise that option."
    )
    return _Found("not given back before a loader ends", "note", meaning)


def _open_files() -> _Found:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if soft == resource.RLIM_INFINITY:
        return _Found(f"{opened}, no limit")
    room = max(soft - opened, 0) // _FDS_PER_WORKER
    value = f"{opened} of {soft}: room for about {room} workers"
    if room >= 64:
        return _Found(value)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    meaning = f"More workers need a higher limit: `ulimit -n`, which may be raised to {most}."
    return _Found(value, "note" if room else "problem", meaning)


def _limits() -> _Found | None:
    import resource

    limits = {
        "address space (ulimit -v)": resource.RLIMIT_AS,
        "file size (ulimit -f)": resource.RLIMIT_FSIZE,
        "locked memory (ulimit -l)": resource.RLIMIT_MEMLOCK,
    }
    found = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    texts = [f"{name}: {soft // _MIB} MiB" for name, soft in found.items() if soft != resource.RLIM_INFINITY]
    meaning = (
        "Shared memory counts as address space and as a file: without room, batches travel by torch's own "
        "transport. A device's driver may lock no more memory, and large tensors are copied once more."
    )
    return _Found(", ".join(texts), "note", meaning) if texts else None


def _rate() -> _Found:
    """Checks that workers start and batches arrive: the rates of both loaders, each with its own workers."""
    # A default device, or another mode of the program's, is not the machine's.
    with modes.without_modes():
        theirs, _ = _tried(_TorchsLoader)
        ours, made = _tried(DataLoader)
    if made is None:
        meaning = "ringloader's loader with workers does not run here. RINGLOADER=off runs torch's."
        return _Found(f"{ours}; torch's: {theirs}", "problem", meaning)
    taken = report.report(made)
    value = f"{ours} batches of 1 KiB a second on path {taken.path}; torch's: {theirs}"
    return _on_path(value, taken.path, taken.reason)


def _tried(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> tuple[str, Any]:
    """Returns the rate of a loader or its error, and the loader if it has run."""
    try:
        # A worker may never answer. torch draws from the generator, and so not from the program's.
        made: Any = cls(_Rows(), batch_size=4, num_workers=_WORKERS, timeout=30, generator=torch.Generator())
        return f"{_batches_per_second(made):.0f}", made
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


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
