"""The three ways to get batches: torch's loader, our class passed in, torch's class under `install()`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import ringloader
from ringloader._core import notes

LoaderClass = type[torch.utils.data.DataLoader[Any]]

# The ways by which a program gets to us, and what it passes to the framework.
OURS = ("class", "install")


@dataclass(frozen=True)
class Made:
    """One iterator that we made, or left to torch."""

    loader: type
    path: str
    reason: str
    counters: Callable[[], Mapping[str, int]] = field(repr=False, compare=False)


@dataclass
class Way:
    """One way while it is in force.

    Attributes:
        name: "torch", "class" or "install".
        DataLoader: The class that a program of this way passes in.
        made: Every iterator that ringloader had a part in, in order.
        reports: What `ringloader.reports()` says at the end, of the loaders of this way alone.
        torchs: How many iterators with workers torch made, while its own way was in force.
        without_workers: How many without.
    """

    name: str
    DataLoader: LoaderClass
    made: list[Made] = field(default_factory=list)
    reports: list[ringloader.LoaderReport] = field(default_factory=list)
    torchs: int = 0
    without_workers: int = 0

    def loader(self, framework_class: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader of a framework's own class; where ours would be passed in, converted."""
        made = framework_class(*args, **kwargs)
        return ringloader.convert(made) if self.name == "class" else made

    @property
    def paths(self) -> list[str]:
        return [made.path for made in self.made]

    @property
    def batches(self) -> int:
        """Batches that came over the rings."""
        return sum(made.counters().get("batches", 0) for made in self.made)


@contextlib.contextmanager
def use(name: str) -> Iterator[Way]:
    """Puts a way in force, with every generator at the same place, and notes the iterators made."""
    way = Way(name, ringloader.DataLoader if name == "class" else torch.utils.data.DataLoader)
    note = notes.note

    def noted(loader: Any, iterator: Any, path: Any, reason: str, counters: Any = dict) -> notes.Note:
        way.made.append(Made(type(loader), path, reason, counters))
        return note(loader, iterator, path, reason, counters)

    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    with pytest.MonkeyPatch.context() as patch:
        # The name by which the core calls it.
        patch.setattr(notes, "note", noted)
        patch.setattr(notes, "_loaders", [])
        if name == "torch":
            patch.setattr(torch.utils.data.DataLoader, "_get_iterator", _counting(way))
        with ringloader.installed() if name == "install" else contextlib.nullcontext():
            yield way
            way.reports = ringloader.reports()


def _counting(way: Way) -> Callable[[Any], Any]:
    torchs_own = torch.utils.data.DataLoader._get_iterator

    def _get_iterator(loader: Any) -> Any:
        way.torchs += loader.num_workers > 0
        way.without_workers += loader.num_workers == 0
        return torchs_own(loader)

    return _get_iterator


# For what builds torch's own class by itself.
INSTALL_ONLY = pytest.mark.parametrize("way_name", ["install"], indirect=True)
# For what an argument of the framework reaches, and `install()` says nothing more about.
CLASS_ONLY = pytest.mark.parametrize("way_name", ["class"], indirect=True)
