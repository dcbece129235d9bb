"""Datasets and samplers of the random programs in ``state_programs.py``."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler


class Hook:
    """Is called by datasets of this process when they read a sample."""

    call: Callable[[], None] | None = None
    pid = 0


def _called() -> None:
    if Hook.call is not None and Hook.pid == os.getpid():
        Hook.call()


def _drawn() -> tuple[float, float]:
    rng = getattr(get_worker_info(), "rng", None)
    if rng is not None and getattr(rng, "torch_generator", None) is not None:
        return 0.0, 0.0
    return random.random(), float(torch.rand(()))


class Data:
    """What datasets share: a sample is its number, what was drawn, the tag of its epoch, the reads so far."""

    def __init__(self, length: int, draws: bool = False, bad: tuple[int, ...] = ()) -> None:
        self.length, self.draws, self.bad = length, draws, bad
        self.tag: Any = None
        # A number that raises, until the program was resumed.
        self.broken: int | None = None

    def __len__(self) -> int:
        return self.length

    def sample(self, number: int, reads: int | None = None) -> tuple[Any, ...]:
        _called()
        drawn = _drawn() if self.draws else None
        if number in self.bad or number == self.broken:
            raise ValueError(f"the bad sample {number}")
        return number, drawn, self.tag, reads


class Map(Data, Dataset):
    def __getitem__(self, index: Any) -> Any:
        return self.sample(plain(index))


class CountingMap(Map):
    """Has a state: the number of its reads."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.sample(plain(index), self.reads)

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Stream(Data, IterableDataset):
    """Has no state. The last worker has fewer samples than the others."""

    __len__ = None  # type: ignore[assignment]

    def share(self) -> list[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return [number for number in range(self.length) if number * number % 7 % workers == worker]

    def __iter__(self) -> Any:
        return (self.sample(number) for number in self.share())


class StatefulStream(Stream):
    """Goes on where its state is."""

    at = 0

    def __iter__(self) -> Any:
        mine = self.share()
        while self.at < len(mine):
            self.at += 1
            yield self.sample(mine[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StickyStream(Stream):
    """Keeps a loaded state, and begins each ``__iter__`` from it, as Hugging Face's streams."""

    loaded: dict[str, Any] | None = None
    now = 0

    def __iter__(self) -> Any:
        mine = self.share()
        self.now = 0 if self.loaded is None else self.loaded["at"]
        while self.now < len(mine):
            self.now += 1
            yield self.sample(mine[self.now - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Cursor:
    def __init__(self, data: Stream) -> None:
        self.data, self.mine, self.at = data, data.share(), 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.mine):
            raise StopIteration
        self.at += 1
        return self.data.sample(self.mine[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class CursorStream(Stream):
    """Its iterator has the state."""

    def __iter__(self) -> Any:
        return Cursor(self)


MAPS = {"map": Map, "counting map": CountingMap}
STREAMS = {
    "stream": Stream,
    "stateful": StatefulStream,
    "sticky": StickyStream,
    "cursor": CursorStream,
}
DATASETS = MAPS | STREAMS


def reset(dataset: Any, _info: Any, seeds: Any) -> None:
    """The ``worker_reset_fn`` of programs: samples tell the epoch of their seeds."""
    dataset.tag = seeds.epoch


# Types of indices: made of a number, and back.
INDICES: dict[str, Callable[[int], Any]] = {
    "int": int,
    "numpy": numpy.int64,
    "tensor": torch.tensor,
    "tuple": lambda number: (number, "a"),
    "text": str,
    "none": lambda _number: None,
}


def plain(index: Any) -> int:
    if index is None:
        return 0
    return int(index[0] if isinstance(index, tuple) else index)


class Own(Sampler):
    """An order that is always the same. Samplers of programs give indices of any type."""

    def __init__(self, length: int, index: str = "int") -> None:
        self.length, self.index = length, index

    def order(self) -> list[int]:
        return [(number * 7 + 3) % self.length for number in range(self.length)]

    def converted(self) -> list[Any]:
        return [INDICES[self.index](number) for number in self.order()]

    def __iter__(self) -> Any:
        return iter(self.converted())

    def __len__(self) -> int:
        return self.length


class Epochal(Own):
    """Shuffles by the epoch that the program sets."""

    def __init__(self, length: int, index: str = "int") -> None:
        super().__init__(length, index)
        self.epoch = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(self.length), self.length)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class CountsAtEnd(Epochal):
    def __iter__(self) -> Any:
        yield from self.converted()
        self.epoch += 1


class CountsAtBeginning(Epochal):
    def __iter__(self) -> Any:
        made = iter(self.converted())
        self.epoch += 1
        return made


class Seeded(Own):
    """Shuffles by a generator of its own."""

    def __init__(self, length: int, index: str = "int") -> None:
        super().__init__(length, index)
        self.generator = torch.Generator().manual_seed(5)

    def order(self) -> list[int]:
        return torch.randperm(self.length, generator=self.generator).tolist()


class Stateful(Own):
    """Has a state, and goes on where it is. Shuffles by the number of its epochs."""

    at = epochs = 0

    def order(self) -> list[int]:
        return random.Random(self.epochs).sample(range(self.length), self.length)

    def __iter__(self) -> Any:
        order = self.converted()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at = 0
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epochs = state["at"], state["epoch"]


class IndexCursor:
    def __init__(self, order: list[Any]) -> None:
        self.order, self.at = order, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class WithCursor(Own):
    """Its iterator has a state."""

    def __iter__(self) -> Any:
        return IndexCursor(self.converted())


class Around(Sampler):
    """Stands around another sampler, by the name that accelerate uses."""

    def __init__(self, sampler: Any, index: str = "int") -> None:
        self.sampler, self.index = sampler, index

    def __iter__(self) -> Any:
        return (INDICES[self.index](number) for number in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class AroundBatches(Sampler):
    """Stands around a batch sampler, as accelerate's BatchSamplerShard."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return itertools.islice(self.batch_sampler, 0, None, 1)

    def __len__(self) -> int:
        return len(self.batch_sampler)


class Batches(Sampler):
    """A batch sampler of one's own: batches of 1, 2, 3, 1, ..."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        indices = iter(self.sampler)
        for number in itertools.count():
            batch = list(itertools.islice(indices, number % 3 + 1))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        return sum(1 for _ in Batches(range(len(self.sampler))))


class StatefulBatches(Batches):
    """Has a state: the number of batches."""

    at = 0

    def __iter__(self) -> Any:
        for batch in itertools.islice(super().__iter__(), self.at, None):
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


OWN: dict[str, type[Own]] = {
    "own": Own,
    "epochal": Epochal,
    "counts at end": CountsAtEnd,
    "counts at beginning": CountsAtBeginning,
    "seeded": Seeded,
    "own state": Stateful,
    "own cursor": WithCursor,
}
TORCHS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "none": lambda _data, _n: {},
    "shuffle": lambda _data, _n: {"shuffle": True},
    "shuffle, generator": lambda _data, _n: {"shuffle": True, "generator": seeded(3)},
    "shuffle, default": lambda _data, _n: {"shuffle": True, "generator": torch.default_generator},
    "random": lambda data, _n: {"sampler": RandomSampler(data)},
    "random, generator": lambda data, _n: {"sampler": RandomSampler(data, generator=seeded(4))},
    "random, both": lambda data, n: {
        "sampler": RandomSampler(data, False, n + 5, seeded(4)),
        "generator": seeded(3),
    },
    "replacement": lambda data, n: {"sampler": RandomSampler(data, True, n + 3)},
    "replacement, generator": lambda data, n: {"sampler": RandomSampler(data, True, n + 3, seeded(4))},
    "subset": lambda _data, n: {"sampler": SubsetRandomSampler(range(1, n))},
    "subset, generator": lambda _data, n: {"sampler": SubsetRandomSampler(range(1, n), seeded(4))},
    "weighted": lambda _data, n: {"sampler": WeightedRandomSampler([1.0 + i for i in range(n)], n)},
    "weighted, generator": lambda _data, n: {
        "sampler": WeightedRandomSampler([1.0 + i for i in range(n)], n, generator=seeded(4))
    },
    "distributed": lambda data, _n: {"sampler": DistributedSampler(data, 2, 1, seed=2)},
    "distributed, drops": lambda data, _n: {"sampler": DistributedSampler(data, 2, 0, drop_last=True)},
}
ORDERS = [*TORCHS, *OWN]
# What stands around a sampler.
AROUND = ["", "sampler", "two samplers", "batches", "two batches", "own batches", "own batches, state"]


def ordered(
    order: str, around: str, index: str, data: Any, length: int, size: int, drop_last: bool
) -> dict[str, Any]:
    """Returns the arguments of a loader that make its order."""
    made = OWN[order](length, "int" if around else index) if order in OWN else None
    given = {"sampler": made} if made is not None else TORCHS[order](data, length)
    if not around:
        return given | {"batch_size": size, "drop_last": drop_last}
    inner = given.pop("sampler", None)
    if inner is None:
        shuffles = given.pop("shuffle", False)
        inner = RandomSampler(data, generator=given.get("generator")) if shuffles else SequentialSampler(data)
    wrapped = Around(inner, index)
    if around == "sampler":
        return given | {"sampler": wrapped, "batch_size": size, "drop_last": drop_last}
    if around == "two samplers":
        return given | {
            "sampler": Around(wrapped, index) if index == "int" else Around(Around(inner), index),
            "batch_size": size,
            "drop_last": drop_last,
        }
    if around.startswith("own batches"):
        return given | {"batch_sampler": (StatefulBatches if "state" in around else Batches)(wrapped)}
    batches = AroundBatches(BatchSampler(inner if index == "int" else wrapped, size, drop_last))
    return given | {"batch_sampler": AroundBatches(batches) if around == "two batches" else batches}
