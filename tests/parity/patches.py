"""Replaces parts of torch, one in each forked process, and tells what both loaders do then.

A program of its own: it must not import ringloader before a part is replaced. Prints one line of JSON for
each part and moment.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import _utils, sampler
from torch.utils.data import dataloader as module

from programs import huge_pages

# Calls of what was put in place, in this process. In a worker: what its samples are moved by.
trace: list[str] = []
offset = 0

MOMENTS = ("before the import", "after the import", "between epochs of persistent workers")


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index + offset


class Counted(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(offset, offset + 5))


class Traced:
    """A function around another that leaves a trace; with `wraps` it passes for the other by its names."""

    def __init__(self, owner: Any, name: str, wraps: bool) -> None:
        original = vars(owner)[name]
        static = isinstance(original, staticmethod)
        called = original.__func__ if static else original

        def theirs(*args: Any, **kwargs: Any) -> Any:
            trace.append(name)
            return called(*args, **kwargs)

        made: Any = functools.wraps(called)(theirs) if wraps else theirs
        setattr(owner, name, staticmethod(made) if static else made)


def _moves_samples(owner: Any, name: str, wraps: bool) -> None:
    """For what runs in a worker, where no trace is seen."""
    called = vars(owner)[name]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        global offset
        offset += 100
        return called(*args, **kwargs)

    setattr(owner, name, functools.wraps(called)(theirs) if wraps else theirs)


def _moved_class(owner: Any, name: str, _wraps: bool) -> None:
    """A subclass in place of a fetcher."""
    base = vars(owner)[name]

    class Theirs(base):  # type: ignore[misc]
        def fetch(self, index: Any) -> Any:
            return super().fetch(index) + 100

    setattr(owner, name, Theirs)


def _iterator_class(owner: Any, name: str, wraps: bool) -> None:
    base = vars(owner)[name]

    class Theirs(base):  # type: ignore[misc]
        def __next__(self) -> Any:
            trace.append("Theirs")
            return super().__next__()

    if wraps:
        Theirs.__name__, Theirs.__qualname__, Theirs.__module__ = (
            base.__name__,
            base.__qualname__,
            base.__module__,
        )
    setattr(owner, name, Theirs)


def _bare_iterator_class(owner: Any, name: str, _wraps: bool) -> None:
    """A class that says something and replaces nothing that is known."""
    base = vars(owner)[name]

    class Theirs(base):  # type: ignore[misc]
        def _try_get_data(self, *args: Any, **kwargs: Any) -> Any:
            return super()._try_get_data(*args, **kwargs)

        @property
        def label(self) -> str:
            return "theirs"

    setattr(owner, name, Theirs)


def _counts_epochs(owner: Any, name: str, wraps: bool) -> None:
    """A constructor that leaves something at the loader, as speechbrain's does."""
    called = vars(owner)[name]

    def theirs(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        called(self, loader, *args, **kwargs)
        loader.epochs = getattr(loader, "epochs", 0) + 1
        loader.passing = True
        del loader.passing
        trace.append(f"{loader.epochs} {hasattr(loader, 'passing')}")

    setattr(owner, name, functools.wraps(called)(theirs) if wraps else theirs)


def _reversed_sampler(owner: Any, name: str, _wraps: bool) -> None:
    """torch's own function, but another one."""
    setattr(owner, name, sampler.SequentialSampler.__iter__)


def _index_sampler(owner: Any, name: str, _wraps: bool) -> None:
    setattr(owner, name, property(lambda _self: [[3, 1], [2, 0]]))


_Multi = module._MultiProcessingDataLoaderIter
_Base = module._BaseDataLoaderIter
_Loader = torch.utils.data.DataLoader

# The owner, the name and how it is replaced.
PATCHES: dict[str, tuple[Any, str, Callable[[Any, str, bool], Any]]] = {
    "_worker_loop": (_utils.worker, "_worker_loop", _moves_samples),
    "_MapDatasetFetcher.fetch": (_utils.fetch._MapDatasetFetcher, "fetch", _moves_samples),
    "_MapDatasetFetcher.__init__": (_utils.fetch._BaseDatasetFetcher, "__init__", _moves_samples),
    "_IterableDatasetFetcher.fetch": (_utils.fetch._IterableDatasetFetcher, "fetch", _moves_samples),
    "_MapDatasetFetcher": (_utils.fetch, "_MapDatasetFetcher", _moved_class),
    "create_fetcher": (module._DatasetKind, "create_fetcher", lambda *args: _creates(*args)),
    "iterator class": (module, "_MultiProcessingDataLoaderIter", _iterator_class),
    "iterator class of another name": (module, "_MultiProcessingDataLoaderIter", _bare_iterator_class),
    **{
        f"{owner.__name__}.{name}": (owner, name, Traced)
        for owner, names in (
            (_Base, ("__init__", "__next__", "_next_index", "_reset")),
            (
                _Multi,
                (
                    "__init__",
                    "_reset",
                    "_next_data",
                    "_try_put_index",
                    "_get_data",
                    "_try_get_data",
                    "_process_data",
                    "_mark_worker_as_unavailable",
                    "_shutdown_workers",
                    "__del__",
                ),
            ),
            (_Loader, ("_get_iterator", "__iter__", "__len__", "check_worker_number_rationality")),
            (sampler.RandomSampler, ("__iter__",)),
            (sampler.BatchSampler, ("__iter__",)),
        )
        for name in names
    },
    "_BaseDataLoaderIter.__init__ that writes": (_Base, "__init__", _counts_epochs),
    "another of torch's": (sampler.RandomSampler, "__iter__", _reversed_sampler),
    "_index_sampler": (_Loader, "_index_sampler", _index_sampler),
    "_get_iterator of the object": (None, "_get_iterator", Traced),
}


def _creates(owner: Any, name: str, wraps: bool) -> None:
    called = vars(owner)[name].__func__

    def theirs(*args: Any, **kwargs: Any) -> Any:
        global offset
        offset += 100
        return called(*args, **kwargs)

    setattr(owner, name, staticmethod(functools.wraps(called)(theirs) if wraps else theirs))


def _replace(name: str, loaders: list[Any], wraps: bool) -> None:
    owner, attribute, how = PATCHES[name]
    if owner is not None:
        how(owner, attribute, wraps)
        return
    for loader in loaders:
        original = loader._get_iterator

        def theirs(self: Any, original: Any = original) -> Any:
            trace.append(str(self is not None))
            return original()

        loader._get_iterator = types.MethodType(theirs, loader)


def _epoch(loader: Any) -> list[Any]:
    trace.clear()
    torch.manual_seed(3)
    kept = loader._iterator is not None
    iterator = iter(loader)
    seen = [iterator.__class__.__mro__[0].__name__ == "Theirs", getattr(iterator, "label", "")]
    values = [batch.tolist() for batch in iterator]
    del iterator
    return [values, list(trace), seen, kept]


def _compared(name: str, moment: str) -> dict[str, Any]:
    wraps = moment != "after the import"
    loaders: list[Any] = []
    if moment == "before the import" and PATCHES[name][0] is not None:
        _replace(name, loaders, wraps)
    import ringloader
    from ringloader._torch import select_path

    said: list[str] = []
    select_path.logger.addHandler(_Kept(said))
    iterable = "Iterable" in name
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "shuffle": not iterable}
    arguments["persistent_workers"] = moment.endswith("persistent workers")
    loaders += [
        kind(Counted() if iterable else Numbers(), **arguments)
        for kind in (torch.utils.data.DataLoader, ringloader.DataLoader)
    ]
    found: list[list[Any]] = [[], []]
    if moment.startswith("between"):
        # Before something is replaced, all that is asked is that it went well.
        for loader in loaders:
            _epoch(loader)
    if moment != "before the import" or PATCHES[name][0] is None:
        _replace(name, loaders, wraps)
    for loader, outcomes in zip(loaders, found, strict=True):
        outcomes += [_epoch(loader), _epoch(loader)]
        outcomes.append(len(loader) if not iterable else 0)
    report = ringloader.report(loaders[1])
    return {"torch": found[0], "ours": found[1], "path": report.path, "reason": report.reason, "said": said}


class _Kept(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(moments: list[str]) -> None:
    """Forks once for each; the answers come through a pipe, as a replaced part may print."""
    torch.set_num_threads(1)
    # Python's default since 3.14 is forkserver, to which what was replaced here says nothing.
    multiprocessing.set_start_method("fork", force=True)
    if "before the import" not in moments:
        # Once, and not in each process.
        import ringloader  # noqa: F401
    gc.collect()
    gc.freeze()
    huge_pages.collapse()
    for name in PATCHES:
        for moment in moments:
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    answer = _compared(name, moment)
                except BaseException:
                    answer = {"failed": traceback.format_exc()}
                with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as pipe:
                    json.dump({"name": name, "moment": moment, **answer}, pipe)
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                print(pipe.read(), flush=True)  # noqa: T201
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
