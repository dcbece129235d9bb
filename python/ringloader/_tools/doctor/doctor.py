"""``doctor()``: all that a bug report needs, with the rates of a test loader, torch's and ours."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.data

from ringloader._features.report import report
from ringloader._tools.doctor import checks
from ringloader._tools.doctor.checks import Finding
from ringloader._torch import hook, internals, modes
from ringloader.dataloader import DataLoader

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The test loader's.
_BATCHES = 400
_WORKERS = 2
# Seconds for a worker that never answers.
_TIMEOUT = 30.0

_WIDTH = 100


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

    Looks at versions, at reasons that keep loaders off the native path, and at the limits on processes,
    descriptors and memory, and runs a test loader beside torch's. ``python -m ringloader doctor`` prints the
    same. Changes nothing, and draws no random numbers of this process.

    Args:
        rate: True to run the test loader, which starts worker processes and takes a few seconds.

    Returns:
        The findings. Their ``str`` belongs into a bug report.
    """
    findings = [*checks.findings()]
    if rate:
        # A default device, or another mode of the program's, is not the machine's.
        with modes.without_modes():
            findings.append(_rate())
    return Diagnosis(tuple(findings))


def _rate() -> Finding:
    """Checks that workers start and batches arrive: the rates of both loaders, each with its own workers."""
    subject = f"test loader, {_WORKERS} workers"
    ours = _tried(DataLoader)
    with _without_noise_of_torchs():
        torchs = _tried(_TorchsLoader)
    value = f"{ours.text}; torch's: {torchs.text}"
    if ours.ran and torchs.ran:
        return Finding(subject, value)
    if ours.ran:
        return Finding(
            subject, value, "note", "torch's loader with workers does not run here, and ringloader's does."
        )
    if torchs.ran:
        return Finding(
            subject,
            value,
            "problem",
            "ringloader's loader with workers does not run here, and torch's does: set RINGLOADER=off.",
        )
    return Finding(subject, value, "problem", "A loader with workers does not run here.")


class _Tried(NamedTuple):
    """The trial of one loader: its rate, or its error."""

    ran: bool
    text: str


def _tried(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> _Tried:
    try:
        loader = _make(cls)
        rate = f"{_batches_per_second(loader):.0f}"
    except Exception as error:
        return _Tried(False, f"{type(error).__name__}: {error}")
    if cls is _TorchsLoader:
        return _Tried(True, rate)
    return _Tried(True, f"{rate} batches of 1 KiB a second on path {report.report(loader).path}")


@contextlib.contextmanager
def _without_noise_of_torchs() -> Iterator[None]:
    """Runs a block without the traceback of torch's iterator when it dies before it was whole."""
    before = sys.unraisablehook

    def hook_of_block(unraisable: Any) -> None:
        if unraisable.object is not internals.Iterator.__del__:
            before(unraisable)

    sys.unraisablehook = hook_of_block
    try:
        yield
    finally:
        sys.unraisablehook = before


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


def _make(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> Any:
    # A generator of its own: torch draws from it, and not from the program's.
    generator = torch.Generator()
    return cls(_Rows(), batch_size=4, num_workers=_WORKERS, timeout=_TIMEOUT, generator=generator)


def _batches_per_second(loader: TorchLoader) -> float:
    batches = iter(loader)
    # The workers' start is not counted.
    next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return count / (time.perf_counter() - start)
