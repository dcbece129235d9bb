"""The ways in, for mypy --strict and pyright: what they return, and the lines that both refuse.

It is checked, not run.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.utils.data
from torch.utils.data import Dataset

import ringloader


class Own(torch.utils.data.DataLoader[int]):
    """A program's own class."""


def convert(
    data: Dataset[int], torchs: torch.utils.data.DataLoader[int], own: Own, ours: ringloader.DataLoader[int]
) -> None:
    assert_type(ringloader.convert(torchs), ringloader.DataLoader[int])
    assert_type(ringloader.convert(own, device="cuda", stats=True), ringloader.DataLoader[int])
    assert_type(ringloader.convert(ours), ringloader.DataLoader[int])
    stateful = ringloader.convert(ringloader.StatefulDataLoader(data))
    assert_type(stateful, ringloader.StatefulDataLoader[int])
    state: dict[str, Any] = stateful.state_dict()
    ringloader.convert(torchs).set_epoch(len(state))
    ringloader.convert(torchs, on_error="skip").epoch_stats()


def install() -> None:
    ringloader.install(stateful=True, worker_method="thread", on_error=ringloader.Retry(2), watchdog=3.5)
    with ringloader.installed(seeding="sample", seed=1) as nothing:
        assert_type(nothing, None)


def refused(torchs: torch.utils.data.DataLoader[int]) -> None:
    ringloader.convert([1])  # type: ignore[call-overload]
    ringloader.convert(torchs, stat=True)  # type: ignore[call-overload]
    ringloader.convert(torchs, stats="yes")  # type: ignore[call-overload]
    ringloader.install(foo=True)  # type: ignore[call-arg]
    ringloader.install(num_workers=2)  # type: ignore[arg-type]
    ringloader.install(last_batch="keep")  # type: ignore[call-arg]
    ringloader.install(on_error="ignore")  # type: ignore[arg-type]
    ringloader.installed(worker_method="threads")  # type: ignore[arg-type]
    ringloader.installed(seed="1")  # type: ignore[arg-type]
