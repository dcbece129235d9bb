"""The times of a loader's epochs in the main process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import ringloader._native as _native
from ringloader._dispatch.dataset import Dispatch
from ringloader._options import kept
from ringloader._options.table import Options
from ringloader._torch import hook, internals


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a loader that a verdict depends on.

    Attributes:
        num_workers: Its workers.
        in_order: True if batches come in the order of their indices.
        persistent_workers: True if workers stay for the next epoch.
        is_iterable: True for a dataset without indices.
        moves: True if batches are pinned, or moved to a device.
        is_dispatch: True if one process reads the source for all workers.
        worker_method: ``"multiprocessing"`` or ``"thread"``.
        main_prefetch: Batches that a thread decodes before their turn.
        most_workers: The most workers that there may be; None for any number.
        cores: Processors that this process may use.
    """

    num_workers: int
    in_order: bool
    persistent_workers: bool
    is_iterable: bool
    moves: bool
    is_dispatch: bool
    worker_method: str
    main_prefetch: int
    most_workers: int | None
    cores: int


class Recording:
    """Notes the times of an iterator's epochs. It does not lead to the iterator.

    Attributes:
        setting: The loader.
        is_installed: True if the loader has the option by ``ringloader.install``.
        recorder: Its times.
        shared_bytes: Bytes of shared memory of all workers; 0 without such memory.
    """

    def __init__(self, setting: Setting, is_installed: bool) -> None:
        self.setting = setting
        self.is_installed = is_installed
        self.recorder = _native.Recorder(max(setting.num_workers, 1))
        self.shared_bytes = 0

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take``, which gives an iterator its next batch, with the clock read before and after."""
        places = self.setting.moves and self.setting.num_workers == 0
        return _native.TimedNext(self.recorder, take, places)

    def placing(self, transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a ``device_transform`` with its time noted."""
        if self.setting.moves and self.setting.num_workers == 0:
            # All that follows a fetch is noted.
            return transform

        def transformed(batch: Any) -> Any:
            begun = time.monotonic_ns()
            try:
                return transform(batch)
            finally:
                self.recorder.note_place(begun)

        return transformed

    def is_last(self) -> bool:
        """True if no epoch that nobody has seen can have run since: one of torch's, behind ``uninstall``."""
        return not self.is_installed or self.recorder.read()["begun"] > hook.ended()

    def begin_epoch(self) -> None:
        """Begins another epoch of the same iterator."""
        self.recorder.begin()


def recording_for(loader: Any, options: Options, has_device: bool) -> Recording | None:
    """Returns what notes the times of an iterator, with ``stats=True``. Its first epoch begins now."""
    if not options.stats:
        return None
    return Recording(
        Setting(
            num_workers=loader.num_workers,
            in_order=loader.in_order,
            persistent_workers=loader.persistent_workers or options.worker_pool is not None,
            is_iterable=loader._dataset_kind == internals.ITERABLE,
            moves=has_device or _pins(loader),
            is_dispatch=isinstance(loader.dataset, Dispatch),
            worker_method=options.worker_method,
            main_prefetch=options.main_prefetch,
            most_workers=None if options.worker_pool is None else options.worker_pool.num_workers,
            cores=_cores(),
        ),
        is_installed=not hasattr(loader, kept.attribute("stats")),
    )


def _pins(loader: Any) -> bool:
    return bool(loader.pin_memory) and torch.accelerator.is_available()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
