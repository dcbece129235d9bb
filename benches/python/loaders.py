"""The loaders that are compared. A further one is one more entry in ``LOADERS``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from . import thread_loaders


@dataclass(frozen=True)
class Taken:
    """The way of an iterator's batches, as the loader itself says."""

    path: str
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Loader:
    """The making of a loader, and the paths of which it must take one for its row to be about it.

    A loader that is there for comparison runs in every second round only (``every``). ``package`` is what
    must be installed beside ours, ``own_environment`` says that it needs another interpreter than this one.
    ``threads``: its workers are threads; ``without_workers``: it has none;
    ``own_shuffle``: it draws a permutation of its own; ``always_in_order``: it has no other way.
    """

    make: Callable[..., Any]
    taken: Callable[[Iterator[Any]], Taken]
    expected_paths: tuple[str, ...]
    every: int = 1
    package: str | None = None
    threads: bool = False
    without_workers: bool = False
    own_environment: bool = False
    own_shuffle: bool = False
    always_in_order: bool = False

    def checked(self, iterator: Iterator[Any]) -> Taken:
        """The path taken.

        Raises:
            RuntimeError: it is not an expected one, so a row would be about another loader.
        """
        taken = self.taken(iterator)
        if taken.path not in self.expected_paths:
            expected = " or ".join(self.expected_paths)
            raise RuntimeError(f"took the path {taken.path!r}, not {expected}: {taken.reason}")
        return taken


def _torch(dataset: Dataset[Any], **arguments: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **arguments)


def _torch_without_workers(dataset: Dataset[Any], **arguments: Any) -> Any:
    return _torch(dataset, **_without_workers(arguments))


def _without_workers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in the main process, where there is nothing to prefetch into."""
    return {**arguments, "num_workers": 0, "prefetch_factor": None}


def _torch_taken(iterator: Iterator[Any]) -> Taken:
    """Torch's own: asked of the class, since another package may have replaced what a loader gives."""
    module = type(iterator).__module__
    return Taken("torch" if module.startswith("torch.") else module)


def _ringloader(dataset: Dataset[Any], **arguments: Any) -> Any:
    from ringloader import DataLoader

    return DataLoader(dataset, **arguments)


def _ringloader_taken(iterator: Iterator[Any]) -> Taken:
    import ringloader

    taken = ringloader.report(iterator)
    if taken.path != "torch" and taken.counters["batches"] == 0:
        raise RuntimeError(f"the path is said to be {taken.path!r}, but it carried no batch")
    return Taken(taken.path, taken.reason, dict(taken.counters))


def _ringloader_without_workers(dataset: Dataset[Any], **arguments: Any) -> Any:
    return _ringloader(dataset, **_without_workers(arguments))


def _ringloader_alone_taken(iterator: Iterator[Any]) -> Taken:
    import ringloader

    taken = ringloader.report(iterator)
    return Taken(taken.path, taken.reason)


def _threads(dataset: Dataset[Any], **arguments: Any) -> Any:
    return _ringloader(dataset, worker_method="thread", **arguments)


def _stateful(dataset: Dataset[Any], **arguments: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    logging.getLogger("torchdata").setLevel(logging.ERROR)
    return StatefulDataLoader(dataset, **arguments)


def _spdl_taken(iterator: Iterator[Any]) -> Taken:
    return Taken(type(iterator.pipeline).__module__.split(".")[0])  # type: ignore[attr-defined]


def _package_taken(iterator: Iterator[Any]) -> Taken:
    return Taken(type(iterator).__module__.split(".")[0])


LOADERS = {
    "torch": Loader(_torch, _torch_taken, ("torch",)),
    "torch-without-workers": Loader(_torch_without_workers, _torch_taken, ("torch",), without_workers=True),
    # A second entry for the same loader: its ratio to the first is the noise of the machine.
    "torch-again": Loader(_torch, _torch_taken, ("torch",)),
    "torchdata-stateful": Loader(
        _stateful, _package_taken, ("torchdata",), every=2, package="torchdata", own_shuffle=True
    ),
    "torchdata-nodes": Loader(
        thread_loaders.torchdata_nodes,
        _package_taken,
        ("torchdata",),
        every=2,
        package="torchdata",
        threads=True,
    ),
    "dataloader-rs": Loader(
        thread_loaders.dataloader_rs,
        _package_taken,
        ("dataloader_rs",),
        every=2,
        package="dataloader_rs",
        threads=True,
        own_environment=True,
        always_in_order=True,
    ),
    "spdl": Loader(thread_loaders.spdl, _spdl_taken, ("spdl",), every=2, package="spdl", threads=True),
    "ringloader-threads": Loader(_threads, _ringloader_taken, ("threads",), threads=True),
    "ringloader-without-workers": Loader(
        _ringloader_without_workers, _ringloader_alone_taken, ("single-process",), without_workers=True
    ),
    "ringloader": Loader(_ringloader, _ringloader_taken, ("native",)),
}
BASELINE = "torch"
BASELINE_ALONE = "torch-without-workers"
OURS = "ringloader"
OURS_ALONE = "ringloader-without-workers"
