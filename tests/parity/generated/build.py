"""The loader's arguments that a case's values stand for, made anew for every run."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.distributed import DistributedSampler

from parity.batch_values import ALL
from parity.datasets import (
    Batched,
    Failing,
    FailingStream,
    Keyed,
    LazyOrder,
    Order,
    Samples,
    SizedStream,
    Stream,
    collate_fails,
    identity,
    init_fails_in_one,
)
from parity.generated.cases import Generated
from parity.harness import Case
from parity.test_kinds import Kinds, Views
from parity.test_random import Trees

_Arguments = dict[str, Any]

_DATASETS: dict[str, Callable[[int], Any]] = {
    "samples": Samples,
    "getitems": Batched,
    "tensors": lambda length: TensorDataset(torch.arange(length), torch.arange(2.0 * length).view(length, 2)),
    "subset": lambda length: Subset(Samples(length + 3), list(range(length + 2, 2, -1))),
    "list": lambda length: [number / 2 for number in range(length)],
    "keyed": lambda _: Keyed(),
    "trees": lambda length: Trees(length, seed=length),
    "raises KeyError": lambda length: Failing(length, "KeyError", frozenset({1, 4})),
    "raises several arguments": lambda length: Failing(length, "several arguments", frozenset({0, 5})),
    "raises StopIteration": lambda length: Failing(length, "StopIteration", frozenset({2})),
    "stream": lambda _: Stream((7, 3)),
    "stream, one empty": lambda _: Stream((4, 0, 5)),
    "stream, sized": lambda _: SizedStream((4, 5), declared=30),
    "stream, sized short": lambda _: SizedStream((4, 5), declared=3),
    "stream, raises": lambda _: FailingStream("ValueError"),
    "datapipe": lambda _: IterableWrapper(range(11)).shuffle(buffer_size=4).sharding_filter(),
    "map datapipe": lambda length: SequenceWrapper(range(length)).map(float),
}


def _sampler(make: Callable[[int, torch.Generator | None], Any]) -> Callable[..., _Arguments]:
    return lambda length, generator: {"sampler": make(length, generator)}


def _batch_sampler(make: Callable[[int, torch.Generator | None], Any]) -> Callable[..., _Arguments]:
    return lambda length, generator: {"batch_sampler": make(length, generator)}


_ORDERS: dict[str, Callable[[int, torch.Generator | None], _Arguments]] = {
    "sequential": lambda *_: {},
    "shuffle": lambda *_: {"shuffle": True},
    "replacement": _sampler(
        lambda n, g: RandomSampler(range(max(n, 1)), replacement=True, num_samples=n + 30, generator=g)
    ),
    "more than there are": _sampler(lambda n, g: RandomSampler(range(n), num_samples=n + 6, generator=g)),
    "subset": _sampler(lambda n, g: SubsetRandomSampler(list(range(0, n, 2)), generator=g)),
    "weighted": _sampler(lambda n, g: WeightedRandomSampler([1.0 + i for i in range(n)], 9, generator=g)),
    "distributed": _sampler(lambda n, _: DistributedSampler(range(n), num_replicas=3, rank=1, seed=n)),
    "list": _sampler(lambda n, _: list(range(n))[::-1]),
    "numpy": _sampler(lambda n, _: np.arange(n)),
    "counted": _sampler(lambda n, _: Order(list(range(n)))),
    "goes on": _sampler(lambda n, _: Order(list(range(n)), after=list(range(n)))),
    "fails": _sampler(lambda n, _: Order(list(range(n)), fail_at=6)),
    "lazy": _sampler(lambda n, _: LazyOrder(list(range(n)))),
    "batches": _batch_sampler(lambda n, _: [tuple(range(n)), [], np.arange(n)][: 3 if n else 2]),
    "batches of torch": _batch_sampler(lambda n, _: BatchSampler(SequentialSampler(range(n)), 4, True)),
    "batches, counted": _batch_sampler(lambda n, _: Order([[i, n - 1 - i] for i in range(n)])),
}

_BATCHES: dict[str, _Arguments] = {
    "1": {},
    "3": {"batch_size": 3},
    "none": {"batch_size": None},
    "4 dropped": {"batch_size": 4, "drop_last": True},
    "20": {"batch_size": 20},
}


def _views(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what collate wrote into the slot, as it is and in parts, beside what it did not write."""
    batch = default_collate(samples)
    values = batch["value"]
    return {
        **batch,
        "first": values[0],
        "columns": values[:, ::2],
        "again": values,
        "other": samples[0]["torch"],
    }


def _draws(worker_id: int) -> None:
    torch.rand(worker_id + 1)
    random.random()
    np.random.rand()


_COLLATES = {"identity": identity, "views": _views, "fails": collate_fails}
_INITS = {"draws": _draws, "fails in one": init_fails_in_one}
_PINS = {"no": {}, "yes": {"pin_memory": True}, "device": {"pin_memory": True, "pin_memory_device": "cuda"}}
_CONTEXTS = {"fork": lambda: "fork", "object": lambda: multiprocessing.get_context("fork")}


def _dataset(case: Generated) -> Any:
    kind = case.dataset.removeprefix("kind: ")
    if kind == case.dataset:
        return _DATASETS[case.dataset](case.length)
    return Kinds([kind]) if kind in ALL else Views(kind)


def _arguments(case: Generated) -> _Arguments:
    samplers = torch.Generator().manual_seed(7) if case.generator == "both" else None
    arguments: _Arguments = {
        "dataset": _dataset(case),
        **_ORDERS[case.order](case.length, samplers),
        **({} if "batches" in case.order else _BATCHES[case.batch]),
        "num_workers": case.workers,
        "prefetch_factor": case.prefetch,
        "persistent_workers": case.persistent,
        "in_order": case.in_order,
        "timeout": case.timeout,
        **_PINS[case.pin],
    }
    if case.generator != "none":
        arguments["generator"] = samplers or torch.Generator().manual_seed(8)
    if case.collate != "default":
        arguments["collate_fn"] = _COLLATES[case.collate]
    if case.init != "none":
        arguments["worker_init_fn"] = _INITS[case.init]
    if case.context != "none":
        arguments["multiprocessing_context"] = _CONTEXTS[case.context]()
    return arguments


def observed_case(case: Generated) -> Case:
    """The case as the harness runs it: two epochs that may be abandoned, and a whole one."""
    return Case(
        functools.partial(_arguments, case),
        epochs=1 if case.dataset.startswith("kind: ") else 3,
        take=case.take,
        unordered=not case.in_order and case.workers > 1,
        ask_length=case.ask_length,
        max_steps=120,
    )
