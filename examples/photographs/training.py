"""One training run, an epoch whenever it is asked for one, and what was measured in it."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from model import make_model
from photographs import PHOTOGRAPHS, Crops, Prepare, Prepared
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from tqdm import tqdm

BATCH_SIZE = 64
NUM_WORKERS = 2
SEED = 7


@dataclass(frozen=True)
class Epoch:
    """One epoch of training. The times exclude the pass over the held-out crops.

    Attributes:
        loss: mean of the batches' losses.
        accuracy: share of the held-out crops that are given the right photograph.
        batches: batches trained on.
        seconds: from before ``iter(loader)`` to the end of the last worker.
        waiting_seconds: of these, inside ``iter(loader)`` and ``next(iterator)``.
        main_cpu_seconds: processor time of the main process with all its threads.
        step_cpu_seconds: of these, forward, backward and optimizer.
        worker_cpu_seconds: processor time of the workers, from their fork to their end.
        path: the path taken, and why.
        verdict: what limits the epoch, as ringloader says.
    """

    loss: float
    accuracy: float
    batches: int
    seconds: float
    waiting_seconds: float
    main_cpu_seconds: float
    step_cpu_seconds: float
    worker_cpu_seconds: float
    path: str
    reason: str
    weights: str
    verdict: str


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _taken(kind: str, iterator: object) -> tuple[str, str]:
    if kind == "torch":
        module = type(iterator).__module__
        return ("torch" if module.startswith("torch.") else module), "torch's own loader"
    import ringloader

    taken = ringloader.report(iterator)
    return taken.path, taken.reason


def _loader_class(kind: str) -> Callable[..., TorchDataLoader[Any]]:
    if kind == "torch":
        return TorchDataLoader
    from ringloader import DataLoader

    return functools.partial(DataLoader, stats=True)


def _verdict(kind: str, loader: object) -> str:
    if kind == "torch":
        return ""
    import ringloader

    return ringloader.epoch_stats(loader).verdict.text


def _dataset(kind: str, directory: Path, augment: bool) -> Dataset[Any]:
    """Returns the crops, prepared. With ringloader each is decoded once."""
    crops, prepare = Crops(directory), Prepare(augment)
    if kind == "torch":
        return Prepared(crops, prepare)
    from ringloader import CachedDataset

    return CachedDataset(crops, then=prepare)


class Training:
    """A model, its optimizer and its loaders."""

    def __init__(self, kind: str, directory: Path) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(SEED)
        self.kind = kind
        loader = _loader_class(kind)
        self.train = loader(
            _dataset(kind, directory / "train", augment=True),
            batch_size=BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            num_workers=NUM_WORKERS,
        )
        self.held_out = loader(
            _dataset(kind, directory / "held-out", augment=False),
            batch_size=BATCH_SIZE,
            num_workers=NUM_WORKERS,
        )
        self.model = make_model(len(PHOTOGRAPHS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One step of the optimizer; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def accuracy(self) -> float:
        """The share of held-out crops that the model gets right."""
        self.model.eval()
        with torch.no_grad():
            right = sum(
                int((self.model(images).argmax(1) == labels).sum()) for images, labels in self.held_out
            )
        self.model.train()
        return right / len(self.held_out.dataset)  # type: ignore[arg-type]

    def weights(self) -> str:
        """A digest of all parameters and buffers."""
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()

    def epoch(self, title: str) -> Epoch:
        """Trains for one epoch."""
        losses = []
        waiting = 0.0
        step_cpu = 0.0
        worker_cpu = -_children_cpu()
        main_cpu = -time.process_time()
        start = time.perf_counter()
        with tqdm(total=len(self.train), desc=title, unit="batch", leave=False, mininterval=0.5) as progress:
            before = time.perf_counter()
            iterator = iter(self.train)
            while True:
                batch = next(iterator, None)
                waiting += time.perf_counter() - before
                if batch is None:
                    break
                before = time.thread_time()
                losses.append(self.step(*batch))
                step_cpu += time.thread_time() - before
                progress.update()
                before = time.perf_counter()
        # The path first: deleting the iterator joins the workers, and only joined children are counted.
        path, reason = _taken(self.kind, iterator)
        del iterator
        seconds = time.perf_counter() - start
        main_cpu += time.process_time()
        worker_cpu += _children_cpu()
        return Epoch(
            loss=sum(losses) / len(losses),
            accuracy=self.accuracy(),
            batches=len(losses),
            seconds=seconds,
            waiting_seconds=waiting,
            main_cpu_seconds=main_cpu,
            step_cpu_seconds=step_cpu,
            worker_cpu_seconds=worker_cpu,
            path=path,
            reason=reason,
            weights=self.weights(),
            verdict=_verdict(self.kind, self.train),
        )


def serve(connection: Connection, kind: str, directory: Path, start_method: str) -> None:
    """Runs in a process of its own: trains an epoch for every title received, until the other end closes."""
    multiprocessing.set_start_method(start_method, force=True)
    training = Training(kind, directory)
    connection.send("ready")
    while True:
        try:
            title = connection.recv()
        except EOFError:
            return
        connection.send(training.epoch(title))
