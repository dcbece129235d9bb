"""Iterators that are not ringloader's, whose batches go through stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringloader._main.stages import Stage, passed


def through(iterator: Any, stages: Sequence[Stage]) -> Any:
    """An iterator whose batches go through ``stages``: the same object, if it is made as torch's are."""
    cls: Any = type(iterator)
    if not stages:
        return iterator
    if not hasattr(cls, "_next_data"):
        return _Through(iterator, stages)
    vars(iterator)["_stages"] = stages
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    iterator.__class__ = type(cls)(cls.__name__, (_NextData, cls), names)
    return iterator


class _NextData:
    """Beneath torch's ``__next__``, so that its record of the profiler has the stages in it."""

    _stages: Sequence[Stage]

    def _next_data(self) -> Any:
        return passed(super()._next_data(), self._stages)  # type: ignore[misc]


class _Through:
    """Stands in front of an iterator of another kind."""

    def __init__(self, iterator: Any, stages: Sequence[Stage]) -> None:
        self._iterator = iterator
        self._stages = stages

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return passed(next(self._iterator), self._stages)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
