"""Random programs over one dataset that is written in two ways: plainly, and with samples that wait."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, get_worker_info

from parity.describe import describe, digest, normalise, tensor_bytes
from parity.harness import forget_frames

# The most steps of an epoch: one that does not end fails.
MOST_STEPS = 200


class UnmadeError(Exception):
    """Cannot be made again of its text alone."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)


ERRORS: tuple[Callable[[int], Exception], ...] = (
    ValueError,
    KeyError,
    lambda index: UnmadeError(index, "truncated"),
)


def tensor(index: int) -> Any:
    return torch.full((index % 3 + 2,), index)


def row(index: int) -> Any:
    return torch.arange(4) + index


def record(index: int) -> Any:
    return {"number": index, "array": np.full(3, index, np.float32), "text": str(index)}


def pair(index: int) -> Any:
    return index / 2, [torch.zeros(2), index]


class Plain(Dataset[Any]):
    """Samples as torch's loader takes them.

    Args:
        length: Their number.
        make: Makes a sample of its index.
        bad: The indices that raise, and the number of their error in ``ERRORS``.
        knows: True if a sample says what ``get_worker_info()`` is.
    """

    def __init__(
        self, length: int, make: Callable[[int], Any], bad: dict[int, int], knows: bool = False
    ) -> None:
        self.length = length
        self.make = make
        self.bad = bad
        self.knows = knows

    def __len__(self) -> int:
        return self.length

    def made(self, index: int) -> Any:
        if index in self.bad:
            raise ERRORS[self.bad[index]](index)
        if not self.knows:
            return self.make(index)
        info = get_worker_info()
        assert info.dataset is not None
        return self.make(index), info.id, info.num_workers, info.seed

    def __getitem__(self, index: int) -> Any:
        return self.made(index)

    def seconds(self, index: int) -> float:
        """Returns how long a sample waits: mostly not at all, so that samples end in another order."""
        return random.Random(index).choice([0, 0, 0, 0.001, 0.003, 0.01])


class Coroutines(Plain):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(self.seconds(index))
        return self.made(index)


class Later:
    """An awaitable that is no coroutine."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __await__(self) -> Any:
        return self.made.__await__()


class Awaitables(Plain):
    """A plain function returns a coroutine, or another awaitable."""

    def __getitem__(self, index: int) -> Any:
        made = self.later(index)
        return made if index % 2 else Later(made)

    async def later(self, index: int) -> Any:
        await asyncio.sleep(self.seconds(index))
        return self.made(index)


class Threads(Plain):
    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds(index))
        return self.made(index)


class AtOnce(Plain):
    """The samples of a batch come from one call."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.made(index) for index in indices]


class CoroutinesAtOnce(AtOnce):
    async def __getitems__(self, indices: list[int]) -> Any:
        await asyncio.sleep(self.seconds(sum(indices)))
        return super().__getitems__(indices)


class ThreadsAtOnce(AtOnce):
    def __getitems__(self, indices: list[int]) -> Any:
        time.sleep(self.seconds(sum(indices)))
        return super().__getitems__(indices)


# The ways in which samples wait, and the class that torch gets.
WAYS: dict[str, tuple[type[Plain], type[Plain]]] = {
    "coroutines": (Coroutines, Plain),
    "awaitables": (Awaitables, Plain),
    "threads": (Threads, Plain),
    "coroutines at once": (CoroutinesAtOnce, AtOnce),
    "threads at once": (ThreadsAtOnce, AtOnce),
}


class Passing(Dataset[Any]):
    """A wrapper of the user's that passes on what the dataset returns."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def wrapped(dice: random.Random, inner: Any, deep: int = 2) -> Any:
    """Returns a dataset in up to two wrappers."""
    kind = dice.choice(["none", "subset", "concat", "stack", "named", "passing"]) if deep else "none"
    if kind == "none":
        return inner
    length = len(inner)
    if kind == "subset":
        inner = Subset(inner, [dice.randrange(length) for _ in range(dice.randrange(1, length + 1))])
    elif kind == "concat":
        inner = ConcatDataset([inner, inner])
    elif kind == "stack":
        inner = StackDataset(inner, inner)
    elif kind == "named":
        inner = StackDataset(one=inner, other=inner)
    else:
        inner = Passing(inner)
    return wrapped(dice, inner, deep - 1)


def counted(samples: list[Any]) -> Any:
    """Collates any samples, of which some may not fit together."""
    return {"count": len(samples), "samples": samples}


def picky(samples: list[Any]) -> Any:
    """Raises for batches of three."""
    if len(samples) == 3:
        raise ValueError("three")
    return samples


def refuse(worker: int) -> None:
    if worker == 1:
        raise OSError("worker 1 has no store")


@dataclass
class Program:
    """A random program: the same for torch and for us, but for the way of its samples.

    Attributes:
        dataset: Makes the dataset, from the class of its samples.
        arguments: Makes the arguments of the loader.
        takes: The batches that each epoch takes before it is broken off; None: all.
        is_ordered: False if batches come as they are made.
    """

    dataset: Callable[[type[Plain]], Any]
    arguments: Callable[[], dict[str, Any]]
    takes: list[int | None]
    is_ordered: bool = True


def sampling(dice: random.Random, length: int, seed: int) -> Callable[[], dict[str, Any]]:
    """Returns what makes the arguments that select samples."""
    kind = dice.choice(["alone", "batches", "sizes", "lists"])
    shuffle, drop_last = dice.random() < 0.5, dice.random() < 0.3
    batch_size = dice.randrange(1, 8)
    lists = [
        [dice.randrange(length) for _ in range(dice.randrange(1, 9))] for _ in range(dice.randrange(1, 9))
    ]

    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        if kind == "alone":
            return {"batch_size": None, "shuffle": shuffle, "generator": generator}
        if kind == "lists":
            return {"batch_sampler": lists, "generator": generator}
        chosen = {"sampler": lists[0]} if kind == "sizes" else {"shuffle": shuffle}
        return {"batch_size": batch_size, "drop_last": drop_last, "generator": generator, **chosen}

    return make


def program(seed: int, way: str, options: dict[str, Any] | None = None) -> Program:
    """Returns the program of a seed.

    Args:
        seed: Of all that is random in it.
        way: One of ``WAYS``.
        options: Options of ours. Then batches are in order, workers do not tell their numbers, and none
            refuses.
    """
    dice, is_plain = random.Random(f"{seed} {way}"), options is not None
    length, make = dice.randrange(1, 30), dice.choice([tensor, row, row, record, pair])
    bad = {dice.randrange(length): dice.randrange(len(ERRORS)) for _ in range(dice.choice([0, 0, 1, 4]))}
    is_ordered = is_plain or dice.random() < 0.85
    knows = is_ordered and not is_plain and dice.random() < 0.5
    wraps = dice.getrandbits(32)
    collate = dice.choice([None, None, list, counted, picky])
    more: dict[str, Any] = {
        "num_workers": dice.randrange(1, 4),
        "prefetch_factor": dice.randrange(1, 6),
        "persistent_workers": dice.random() < 0.5,
        "in_order": is_ordered,
    }
    if collate is not None:
        more["collate_fn"] = collate
    if dice.random() < 0.1 and not is_plain:
        more["worker_init_fn"] = refuse
    takes = [dice.choice([None, None, 1, 2, 4]) for _ in range(dice.randrange(1, 4))]

    def dataset(kind: type[Plain]) -> Any:
        inner = kind(length, make, bad, knows)
        if way.endswith("at once"):
            # Other wrappers look at what `__getitems__` returns.
            return Subset(inner, list(range(length))[::-1]) if wraps % 2 else inner
        return wrapped(random.Random(wraps), inner)

    indices = sampling(dice, len(dataset(Plain)), seed)
    return Program(dataset, lambda: {**indices(), **more, **(options or {})}, takes, is_ordered)


@dataclass
class Seen:
    """All that a program sees: its steps, epoch by epoch, and the numbers that are drawn."""

    epochs: list[list[Any]] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)


def told(error: Exception) -> Any:
    """Returns the kind of an error and its text, without the frames between."""
    lines = [line for line in normalise(str(error)).splitlines() if line.strip()]
    forget_frames(error)
    return "error", type(error).__qualname__, lines[:1], lines[-1:]


def step(iterator: Any) -> Any:
    """Returns what one call of ``next`` gives."""
    try:
        return "batch", describe(next(iterator))
    except StopIteration:
        return ("stop",)
    except Exception as error:
        return told(error)


def run(loader: Any, takes: Iterable[int | None]) -> Seen:
    """Runs the epochs of a program."""
    torch.manual_seed(5)
    seen = Seen()
    for most in takes:
        iterator = iter(loader)
        steps: list[Any] = []
        while len(steps) != most and (not steps or steps[-1] != ("stop",)):
            assert len(steps) < MOST_STEPS
            steps.append(step(iterator))
        seen.epochs.append(steps)
        seen.draws.append(digest(tensor_bytes(torch.get_rng_state())))
        del iterator
    gc.collect()
    return seen


def without_workers(seen: Seen) -> Seen:
    """Returns what was seen, without the numbers of workers in it."""
    told = [
        [re.sub(r"worker process \d", "worker process", repr(step)) for step in steps]
        for steps in seen.epochs
    ]
    return Seen(told, seen.draws)


def as_came(seen: Seen) -> Seen:
    """Returns whole epochs in an order of their own, for batches that come as they are made."""
    whole = [sorted(steps) for steps in without_workers(seen).epochs if steps[-1:] == [repr(("stop",))]]
    return Seen(whole, seen.draws)
