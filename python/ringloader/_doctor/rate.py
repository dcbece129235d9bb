"""The rate of a test loader, beside torch's: a check that workers start here, and batches arrive."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.utils.data

from ringloader._doctor.diagnosis import Finding
from ringloader._report import report
from ringloader._torch import hook, internals
from ringloader.dataloader import DataLoader

_BATCHES = 400
_WORKERS = 2
# Seconds for a worker that never answers.
_TIMEOUT = 30.0


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A sample costs next to nothing, so the rate is the loader's."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))

    def __len__(self) -> int:
        return 4 * _BATCHES


def finding() -> Finding:
    """The rates of both loaders, each with workers of its own."""
    subject = f"test loader, {_WORKERS} workers"
    try:
        ours = _make(DataLoader)
        rate = _batches_per_second(ours)
        rate_of_torch = _batches_per_second(_make(_TorchsLoader))
    except Exception as error:
        return Finding(
            subject,
            f"{type(error).__name__}: {error}",
            "problem",
            "A loader with workers does not run here.",
        )
    path = report.report(ours).path
    value = f"{rate:.0f} batches of 1 KiB a second on path {path}; torch's: {rate_of_torch:.0f}"
    return Finding(subject, value)


class _TorchsLoader(torch.utils.data.DataLoader[torch.Tensor]):
    def _get_iterator(self) -> Any:
        # Also while install() is in effect.
        return hook.beneath(internals.Loader._get_iterator)(self)


def _make(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> Any:
    # A generator of its own: torch draws from it, and not from the program's.
    generator = torch.Generator()
    return cls(_Rows(), batch_size=4, num_workers=_WORKERS, timeout=_TIMEOUT, generator=generator)


def _batches_per_second(loader: Any) -> float:
    batches = iter(loader)
    # The workers' start is not counted.
    next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return count / (time.perf_counter() - start)
