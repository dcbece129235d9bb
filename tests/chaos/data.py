"""Datasets and collate functions of the cases; workers of every start method can import them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from chaos.case import must
from small_datasets import Numbers


def check(batch: torch.Tensor, first: int, size: int = 1) -> None:
    """Every byte of it."""
    wanted = torch.arange(first, first + size).unsqueeze(1)
    must(batch.shape[0] == size and bool((batch == wanted).all()), f"the batch of {first} is not what it was")


def check_all(batches: Any, length: int) -> None:
    """Each of `length` batches of one sample once, in order, every byte."""
    count = 0
    for batch in batches:
        check(batch, count)
        count += 1
    must(count == length, f"{count} batches came, and {length} are due")


class Dies(Numbers):
    """The worker ends in the named way at one index; with a folder, only the first one that comes to it."""

    def __init__(
        self, length: int, at: int, how: str, once: Path | None = None, elements: int = 3000
    ) -> None:
        super().__init__(length, elements)
        self.at = at
        self.how = how
        self.once = once

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and get_worker_info() is not None:
            mark = self.once and self.once / "died"
            if mark is None or not mark.exists():
                if mark is not None:
                    mark.touch()
                die(self.how)
        return super().__getitem__(index)


def die(how: str) -> None:
    if how.startswith("exit"):
        os._exit(int(how[4:]))
    if how == "abort":
        os.abort()
    os.kill(os.getpid(), signal.Signals[f"SIG{how.upper()}"])
    # A stopped one comes back here.
    if how != "stop":
        time.sleep(60)


class Slow(Numbers):
    """One index, or each, takes its time."""

    def __init__(self, length: int, seconds: float, at: int | None = None) -> None:
        super().__init__(length)
        self.seconds = seconds
        self.at = at

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.at is None or index == self.at:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class Stubborn(Numbers):
    """Takes forever at one index, and no SIGTERM ends it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        return super().__getitem__(index)


class Raises(Numbers):
    """Raises at one index what `make` returns."""

    def __init__(self, length: int, at: int, make: Any) -> None:
        super().__init__(length)
        self.at = at
        self.make = make

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise self.make()
        return super().__getitem__(index)


class Returns(Numbers):
    """Returns at one index what `make` returns."""

    def __init__(self, length: int, at: int, make: Any) -> None:
        super().__init__(length)
        self.at = at
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make() if index == self.at else super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """Numbers from each worker, and an error behind `raises` of them."""

    def __init__(self, length: int, raises: int | None = None) -> None:
        self.length = length
        self.raises = raises

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            if index == self.raises:
                raise LookupError("the stream broke")
            yield torch.full((100,), index)


def identity(samples: Any) -> Any:
    return samples
