"""Datasets and samplers of the cases: at module level, so that spawned workers can import them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def identity(value: Any) -> Any:
    return value


def draws() -> dict[str, Any]:
    """The worker that made this sample, and one number of every generator a worker seeds."""
    info = get_worker_info()
    return {
        "worker": -1 if info is None else info.id,
        "workers": 0 if info is None else info.num_workers,
        "seed": -1 if info is None else info.seed,
        "initial_seed": torch.initial_seed(),
        "torch": torch.rand(2),
        "numpy": np.random.rand(),
        "python": random.random(),
    }


class Samples(Dataset[Any]):
    """Sample `i` tells its index, the index's type, its worker and that worker's random numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> dict[str, Any]:
        number = int(index)
        return {
            "index": number,
            "type": f"{type(index).__module__}.{type(index).__name__}",
            "value": torch.full((3,), number, dtype=torch.float32),
            **draws(),
        }


class Keyed(Dataset[Any]):
    """Takes any index and tells what it was."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> tuple[str, str, Any]:
        return (f"{type(index).__module__}.{type(index).__qualname__}", ascii(index), index)


class Batched(Samples):
    """Has `__getitems__`, which keeps the list it gets and tells about it."""

    def __getitems__(self, indices: Any) -> list[dict[str, Any]]:
        kind = type(indices).__name__
        return [self[index] | {"asked": kind, "together": len(indices)} for index in indices]


class Stream(IterableDataset[Any]):
    """Every worker yields its own samples: `lengths[worker]` of them."""

    def __init__(self, lengths: tuple[int, ...], *, declared: int | None = None) -> None:
        self.lengths = lengths
        self.declared = declared

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(self.lengths[worker % len(self.lengths)]):
            yield {"number": number, **draws()}


class SizedStream(Stream):
    def __len__(self) -> int:
        return 0 if self.declared is None else self.declared


class SeveralArgumentsError(Exception):
    """Cannot be made from one string, which is what torch tries."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, lambda: None)


class SpeaksError(Exception):
    def __init__(self, message: str | None = None) -> None:
        super().__init__(message)


ERRORS = {
    "KeyError": lambda: KeyError("missing\nkey"),
    "ValueError": lambda: ValueError("bad value \u00e9\u4e2d"),
    "several arguments": lambda: SeveralArgumentsError(7, "because"),
    "unpicklable": lambda: UnpicklableError("holds a function"),
    "message": lambda: SpeaksError("said"),
    "no arguments": lambda: RuntimeError(),
    "StopIteration": lambda: StopIteration(3),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no start byte"),
    "os": lambda: FileNotFoundError(2, "No such file", "a/b"),
    "chained": None,
}


class Failing(Samples):
    """Raises a named error at some indices."""

    def __init__(self, length: int, error: str, bad: frozenset[int]) -> None:
        super().__init__(length)
        self.error = error
        self.bad = bad

    def __getitem__(self, index: Any) -> dict[str, Any]:
        if index in self.bad:
            make = ERRORS[self.error]
            if make is None:
                try:
                    raise KeyError("first")
                except KeyError as first:
                    raise ValueError("second") from first
            raise make()
        return super().__getitem__(index)


class FailingStream(Stream):
    def __init__(self, error: str) -> None:
        super().__init__((6, 4))
        self.error = error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in super().__iter__():
            if sample["number"] == 2 and sample["worker"] == 0:
                raise ERRORS[self.error]()
            yield sample


class FailsToStart(Stream):
    def __init__(self) -> None:
        super().__init__((3,))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise ValueError("no first sample")


class Slow(Samples):
    """The named indices take their time."""

    def __init__(self, length: int, seconds: dict[int, float]) -> None:
        super().__init__(length)
        self.seconds = seconds

    def __getitem__(self, index: Any) -> dict[str, Any]:
        time.sleep(self.seconds.get(int(index), 0))
        return super().__getitem__(index)


class Order(Sampler[Any]):
    """Yields given indices and counts what is asked of it; `after` comes past the first StopIteration."""

    def __init__(
        self, indices: list[Any], after: list[Any] | None = None, fail_at: int | None = None
    ) -> None:
        self.indices = indices
        self.after = list(after or [])
        self.fail_at = fail_at
        self.log: list[str] = []

    def observe(self) -> tuple[int, int, str]:
        return (self.log.count("iter"), self.log.count("next"), " ".join(self.log[-4:]))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        self.log.append("iter")
        return _Cursor(self)


class _Cursor:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.position = 0

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> Any:
        self.order.log.append("next")
        self.position += 1
        if self.order.fail_at == self.position - 1:
            raise LookupError("the sampler is out of order")
        if self.position <= len(self.order.indices):
            return self.order.indices[self.position - 1]
        if self.position == len(self.order.indices) + 1 or not self.order.after:
            raise StopIteration
        return self.order.after.pop(0)


class LazyOrder(Order):
    """A generator function, whose first line runs at the first `next`; it draws from the global generator."""

    def __iter__(self) -> Iterator[Any]:
        self.log.append("started")
        offset = int(torch.randint(0, 3, ()))
        for index in self.indices:
            self.log.append("yield")
            yield (index + offset) % len(self.indices)
        self.log.append("ended")


def init_draws(worker_id: int) -> None:
    """Uses up random numbers and leaves a trace in the dataset."""
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    torch.rand(1)
    info.dataset.length = info.dataset.length


def init_fails(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} cannot start")


def init_fails_in_one(worker_id: int) -> None:
    if worker_id == 1:
        raise KeyError("second worker")


def collate_fails(samples: list[Any]) -> Any:
    if any(sample["index"] == 5 for sample in samples):
        raise ValueError("cannot collate the fifth")
    return torch.utils.data.default_collate(samples)


def value_of(index):
    """Returns the byte of sample `index`. Never zero: that is what memory is that was given back."""
    return index % 250 + 1


class Filled(Dataset):
    """Sample `i` is `size` bytes of the value of `i`."""

    def __init__(self, length, size):
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), value_of(index), dtype=torch.uint8)


class Blocks(Filled):
    """Samples as of ``Filled``, and a small label."""

    def __getitem__(self, index):
        return super().__getitem__(index), torch.tensor(index)


def right(batch):
    """True if a batch of one block still holds what its label says."""
    block, label = batch
    return bool((block == value_of(int(label))).all())
