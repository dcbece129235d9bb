"""The workloads: what is loaded, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from . import datasets
from .files import (
    FILES,
    crop_paths,
    has_photographs,
    photograph_paths,
    write_jpegs,
    write_photographs,
    write_tokens,
)

NUM_WORKERS = 2
PREFETCH_FACTOR = 2
# Samples in an epoch: enough for a fast loader in the timed window, few enough for a permutation.
ENDLESS = 1 << 40
SHUFFLED = 1_000_000


@dataclass(frozen=True)
class Workload:
    """One row.

    ``prepare`` makes the files that it reads; without what ``available`` looks for, which ``needs`` tells,
    the row is left out. ``seconds`` scales the timed window: rows of slow batches need longer for as many of
    them. ``random`` says that samples are drawn with the worker's generator, so that only worker processes
    give those of torch's workers.
    """

    name: str
    text: str
    dataset: Callable[[], Dataset[Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], object] | None = None
    available: Callable[[], bool] | None = None
    needs: str = ""
    seconds: float = 1.0
    verified_batches: int = 64
    random: bool = False

    def loader_arguments(self, **changed: Any) -> dict[str, Any]:
        """All arguments of the loader but the dataset."""
        return {"num_workers": NUM_WORKERS, "prefetch_factor": PREFETCH_FACTOR, **self.arguments, **changed}

    @property
    def in_order(self) -> bool:
        """True if the batches come in torch's order."""
        return bool(self.arguments.get("in_order", True))


def _fresh(size_bytes: int) -> Callable[[], Dataset[Any]]:
    return lambda: datasets.Fresh(ENDLESS, size_bytes)


def _objects(name: str, text: str, make: Callable[[datasets.Passage], Any]) -> list[Workload]:
    """Batches without a tensor, with one worker and with two: the main process has as much to do as they."""
    return [
        Workload(
            f"{name}-{workers}",
            f"{text}, {workers} worker{'s' * (workers > 1)}",
            lambda: datasets.Objects(ENDLESS, make),
            {"batch_size": 16, "collate_fn": list, "num_workers": workers},
        )
        for workers in (1, 2)
    ]


WORKLOADS = [
    Workload("tensor-1kb", "one tensor of 1 KB", _fresh(1024), {"batch_size": None}),
    Workload(
        "tensors-40x1kb",
        "dict of 40 tensors of 1 KB",
        lambda: datasets.FreshMany(ENDLESS, 40),
        {"batch_size": None},
    ),
    Workload("tensor-1mb", "one fresh tensor of 1 MB", _fresh(1 << 20), {"batch_size": None}),
    Workload(
        "tensor-38mb",
        "one fresh tensor of 38 MB",
        _fresh(38 << 20),
        {"batch_size": None},
        verified_batches=16,
    ),
    Workload(
        "images-uint8",
        "64 uint8 images 3x224x224, default_collate",
        lambda: datasets.Slices(ENDLESS, (3, 224, 224), torch.uint8),
        {"batch_size": 64},
        verified_batches=24,
    ),
    Workload(
        "images-float32",
        "64 float32 images 3x224x224, default_collate",
        lambda: datasets.Slices(ENDLESS, (3, 224, 224), torch.float32),
        {"batch_size": 64},
        verified_batches=16,
    ),
    Workload(
        "tiny-1",
        "1 sample of 8 floats and an int, shuffled",
        lambda: datasets.Tabular(SHUFFLED),
        {"batch_size": 1, "shuffle": True},
    ),
    Workload(
        "tiny-64",
        "64 samples of 8 floats and an int, shuffled",
        lambda: datasets.Tabular(SHUFFLED),
        {"batch_size": 64, "shuffle": True},
    ),
    Workload(
        "tokens",
        "8 windows of 2048 tokens from a mapped file, shuffled",
        lambda: datasets.TokenWindows(SHUFFLED, FILES / "tokens.bin", 2048),
        {"batch_size": 8, "shuffle": True},
        prepare=write_tokens,
    ),
    Workload(
        "click-log",
        "256 rows of 28 scalar tensors in a dict",
        lambda: datasets.ClickLog(ENDLESS, 28),
        {"batch_size": 256},
        verified_batches=32,
    ),
    Workload(
        "graphs",
        "32 ragged graphs: padded tensor, 32 tensors, strings",
        lambda: datasets.Graphs(ENDLESS),
        {"batch_size": 32, "collate_fn": datasets.collate_graphs},
    ),
    *_objects("user-dicts", "16 UserDicts of two lists of 512 ints", datasets.as_user_dict),
    *_objects("dataclasses", "16 objects of a dataclass, with 512 ints", lambda one: one),
    *_objects("dicts", "16 dicts of a string, 512 ints and 8 tuples", datasets.as_dict),
    *_objects("sequences", "16 nested lists of 96 ints, tuples and a string", datasets.as_sequences),
    Workload(
        "collated-10mb",
        "16 float32 samples, 10 MB collated",
        lambda: datasets.Slices(ENDLESS, (160, 1024), torch.float32),
        {"batch_size": 16},
        verified_batches=24,
    ),
    Workload(
        "jpeg",
        "8 JPEG files of 600 KB, decoded with Pillow, 224x224",
        lambda: datasets.Jpegs(SHUFFLED, sorted((FILES / "jpeg").glob("*.jpg")), 224),
        {"batch_size": 8, "shuffle": True},
        prepare=write_jpegs,
        seconds=2.0,
        verified_batches=12,
        random=True,
    ),
    Workload(
        "jpeg-photographs",
        "64 JPEG photographs of 448x448 (600 KB decoded), decoded with Pillow",
        lambda: datasets.Jpegs(SHUFFLED, photograph_paths(), None),
        {"batch_size": 64, "shuffle": True},
        prepare=write_photographs,
        available=has_photographs,
        needs="the photographs in scikit-image and scikit-learn, of the dependency group 'demo'",
        seconds=2.0,
        verified_batches=8,
    ),
    Workload(
        "jpeg-crops",
        "64 JPEG crops of real photographs, decoded with Pillow",
        lambda: datasets.Jpegs(SHUFFLED, crop_paths(), None),
        {"batch_size": 64, "shuffle": True},
        available=lambda: bool(crop_paths()),
        needs="the crops that make demo cuts",
        seconds=2.0,
        verified_batches=12,
    ),
    Workload(
        "slow-store",
        "slow store: 16 samples of 1 ms, one in 50 of 60 ms; 8 workers",
        lambda: datasets.SlowStore(ENDLESS),
        {"batch_size": 16, "num_workers": 8},
        seconds=8.0,
    ),
    Workload(
        "slow-store-unordered",
        "slow store, in_order=False",
        lambda: datasets.SlowStore(ENDLESS),
        {"batch_size": 16, "num_workers": 8, "in_order": False},
        seconds=8.0,
    ),
]
BY_NAME = {workload.name: workload for workload in WORKLOADS}
