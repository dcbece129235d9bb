"""Iterators that are not ringloader's, whose batches are moved, and go through stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ringloader._main.bad_samples import Collecting
from ringloader._main.device import Moving
from ringloader._main.stages import Stage, passed
from ringloader._torch import internals
from ringloader._worker.epochs import EpochStep
from ringloader._worker.fetch import PutSteps, Step


def view_for(loader: Any, moving: Moving | None, steps: Sequence[Step]) -> Any:
    """The loader as torch's own iterator is to see it, for what options do beside it.

    Args:
        loader: The loader.
        moving: What brings its batches to where they are needed, if they are needed elsewhere.
        steps: What its workers' fetchers go through.
    """
    from ringloader._main.transport_iterator import LoaderView

    others: dict[str, Any] = {}
    if moving is not None:
        others["pin_memory"] = False
    if loader.num_workers:
        if steps:
            others["worker_init_fn"] = PutSteps(steps, loader.worker_init_fn)
    elif any(isinstance(step, EpochStep) for step in steps):
        # So that its fetcher asks the dataset for nothing: `begin_without_workers` makes the one that counts.
        others["_dataset_kind"] = internals.MAP
    return LoaderView(loader, **others) if others else loader


def through(
    iterator: Any, placement: Moving | None, stages: Sequence[Stage], collecting: Collecting | None = None
) -> Any:
    """An iterator whose batches go on: the same object, if it is made as torch's are.

    Args:
        iterator: The iterator.
        placement: What brings its batches to where they are needed, if they are needed elsewhere.
        stages: What they go through then.
        collecting: What takes batches with ``on_error`` apart, before that.
    """
    cls: Any = type(iterator)
    if placement is None and not stages and collecting is None:
        return iterator
    if not hasattr(cls, "_next_data"):
        return _Through(iterator, placement, stages)
    vars(iterator).update(_placement=placement, _stages=stages, _collecting=collecting)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    iterator.__class__ = type(cls)(cls.__name__, (_NextData, cls), names)
    return iterator


class _NextData:
    """Beneath torch's ``__next__``, so that its record of the profiler has the stages in it."""

    _placement: Moving | None
    _stages: Sequence[Stage]
    _collecting: Collecting | None

    def _next_data(self) -> Any:
        return _next(super()._next_data, self._placement, self._stages, self._collecting)  # type: ignore[misc]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._placement is not None:
            self._placement.abandon()
            if not first_iter:
                self._placement.begin_epoch()
        if self._collecting is not None and not first_iter:
            self._collecting.begin_epoch(loader)
        super()._reset(loader, first_iter)  # type: ignore[misc]


def _next(
    take: Callable[[], Any],
    placement: Moving | None,
    stages: Sequence[Stage],
    collecting: Collecting | None = None,
) -> Any:
    if placement is not None:
        take = functools.partial(placement.place_next, take)
    return passed(take() if collecting is None else collecting.next(take), stages)


class _Through:
    """Stands in front of an iterator of another kind."""

    def __init__(self, iterator: Any, placement: Moving | None, stages: Sequence[Stage]) -> None:
        self._iterator = iterator
        self._placement = placement
        self._stages = stages

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return _next(self._iterator.__next__, self._placement, self._stages)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
