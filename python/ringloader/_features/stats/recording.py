"""The times of a loader's epochs, in workers and in the main process, and the figures of the last one."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import ringloader._native as _native
from ringloader._core import notes
from ringloader._core.feature import Feature, Setup, Stage, StagePosition, Take
from ringloader._core.make import needed_by
from ringloader._features.cores import cores
from ringloader._features.devices import resolve
from ringloader._features.rules import THREAD
from ringloader._features.stats import verdict
from ringloader._features.stats.epoch import EpochStats, SlowFetch, Verdict, WorkersChange, WorkerStats
from ringloader._features.table import Options, check, has_options
from ringloader._torch import hook, internals
from ringloader._worker.fetch import SampleFetcher
from ringloader._worker.options import EpochStart, Fetcher, Position, WorkerOption

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader

_SECOND = 1e-9


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Recording:
    """Returns the feature of ``stats``, whose first epoch begins."""
    return Recording(loader, options, setup, _native.Recorder(max(setup.workers, 1)))


class Recording(Feature):
    """Notes the times of an iterator's epochs, the first of which begins now. It does not lead to the loader.

    Args:
        loader: The loader.
        options: Its options.
        setup: The way in which the iterator makes its batches.
        recorder: The clock, which has begun the first epoch.

    Attributes:
        recorder: The clock.
    """

    position = StagePosition.TIMES

    def __init__(
        self, loader: TorchLoader, options: Options, setup: Setup, recorder: _native.Recorder
    ) -> None:
        self.recorder = recorder
        self._history = setup.history
        self._under_way = setup.under_way or (lambda _worker: 1)
        # Bytes of shared memory of all workers.
        self._shared_bytes = 0
        self._decodes_early = options.main_prefetch > 0
        workers = setup.workers
        has_device = options.device is not None and resolve(options.device) is not None
        clocks = [_native.WorkerClock() for _ in range(workers)] if setup.path == "threads" else None
        is_iterable = loader._dataset_kind == internals.ITERABLE
        self._timing = Timing(clocks) if workers else TimingHere(recorder, is_iterable)
        self._clocks = clocks
        # Returns the most batches that may be under way, for a number of workers that share them.
        self._window: Callable[[int], int] | None = None
        self._setting = verdict.Setting(
            num_workers=workers,
            # torch 2.6 goes round the workers in any order.
            may_be_unordered=loader.in_order and internals.counts_tasks_per_worker(),
            persistent_workers=loader.persistent_workers or options.worker_pool is not None,
            is_iterable=is_iterable,
            moves=has_device or _pins(loader),
            is_dispatch=needed_by(loader.dataset) == "Dispatch",
            worker_method=options.worker_method,
            may_use_threads=options.worker_method != THREAD and _goes(loader, options, worker_method=THREAD),
            may_be_at_once=options.worker_concurrency == 1 and not is_iterable,
            may_prefetch=not options.main_prefetch and _goes(loader, options, main_prefetch=1),
            most_workers=None if options.worker_pool is None else options.worker_pool.num_workers,
            cores=cores(),
            window=None,
        )
        self._is_installed = not has_options(loader)
        # Then all that follows a fetch counts as placing.
        self._places_here = self._setting.moves and not workers
        # True if batches are moved or transformed in `next`, and nothing else notes for how long.
        is_noted_here = options.device_transform is not None and not self._places_here
        self._notes_placing = setup.path == "torch" if has_device else is_noted_here
        # The time at which the batch came that is placed next.
        self._fetched = 0

    def workers(self) -> Iterable[WorkerOption]:
        return (self._timing,)

    def attach(self, transport: Any) -> None:
        if self._clocks is None:
            self._shared_bytes = transport.engine.share * self._setting.num_workers
        else:
            transport.engine.time(self._clocks)

    def begun(self, _loader: TorchLoader, iterator: OurIterator) -> None:
        transport = getattr(iterator, "_transport", None)
        if transport is not None:
            self._window = transport.joint_tasks

    def schedule(self, scheduler: Any) -> None:
        scheduler.record(self.recorder, self._decodes_early)

    def begin_times(self) -> None:
        self.recorder.begin()

    def noted(self, note: notes.Note) -> None:
        note.more["recording"] = self

    def stages(self) -> Iterable[Stage]:
        return (_Fetched(self._note_fetched), self) if self._notes_placing else (self,)

    def around(self, take: Take) -> Take:
        """Returns ``take``, which gives an iterator its next batch, with the clock read before and after."""
        take = functools.partial(self._placed, take) if self._notes_placing else take
        return _native.TimedNext(self.recorder, take, self._places_here)

    def _placed(self, take: Take, iterator: OurIterator) -> Any:
        # A batch that could not be moved before is not fetched again.
        self._note_fetched()
        batch = take(iterator)
        self.recorder.note_place(self._fetched)
        return batch

    def _note_fetched(self) -> None:
        self._fetched = time.monotonic_ns()

    def figures(self, path: str) -> EpochStats | None:
        """Returns the figures of the epoch; None if one that was not seen may have run since.

        Args:
            path: The path of the batches, as a report names it.
        """
        read = self.recorder.read()
        begun, first, last = read["begun"], read["first"], read["last"]
        if self._is_installed and begun < hook.ended():
            return None
        seconds = (last - begun) * _SECOND
        startup = seconds if first is None else (first - begun) * _SECOND
        waiting = read["waiting"] * _SECOND
        decode, place, index = (spent * _SECOND for spent in read["main"])
        # There torch's own workers are at work, of which nothing is known.
        workers = [] if path == "torch" else read["workers"]
        setting, number = self._setting, self._setting.num_workers
        changes: tuple[WorkersChange, ...] = ()
        if self._history is not None:
            number, all_changes = self._history()
            changes = tuple(
                WorkersChange((one.at - begun) * _SECOND, one.number, one.why)
                for one in all_changes
                if one.at >= begun
            )
            made = [worker for worker, (batches, *_) in enumerate(workers, start=1) if batches]
            workers = workers[: max(number, *made, 0)]
            # The loader has found it, so no other one is advised.
            setting = dataclasses.replace(setting, num_workers=number, most_workers=number)
        if self._window is not None:
            setting = dataclasses.replace(setting, window=self._window(number))
        found = EpochStats(
            path=path,
            num_workers=setting.num_workers,
            batches=read["batches"],
            seconds=seconds,
            startup=startup,
            waiting=waiting,
            caller=max(seconds - startup - waiting, 0.0),
            main={"decode": decode, "place": place, "index": index},
            workers=tuple(
                WorkerStats(number, batches, *(spent * _SECOND for spent in times), self._under_way(number))  # type: ignore[call-arg]
                for number, (batches, *times) in enumerate(workers)
            ),
            slowest=tuple(SlowFetch(spent * _SECOND, *rest) for spent, *rest in read["slowest"]),
            verdict=Verdict("unknown", ""),
            changes=changes,
            _trace=self.recorder.trace(),
        )
        judged = verdict.Judge(found, setting, read["first_made"] * _SECOND, self._shared_bytes)
        return dataclasses.replace(found, verdict=judged.verdict())


class Timing(WorkerOption):
    """Lets a worker's clock record the moments of each batch, which travel with it.

    Args:
        clocks: The clocks of threads, by their workers; None for processes, which make their own.
    """

    position = Position.CLOCK

    def __init__(self, clocks: Sequence[_native.WorkerClock] | None = None) -> None:
        self._clocks = clocks

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        if port is None:
            assert self._clocks is not None
            self._clock = self._clocks[worker]
        else:
            self._clock = _native.WorkerClock()
            port.time(self._clock)

    def fill(self, samples: SampleFetcher) -> None:
        _time_collation(self._clock, samples.torchs)

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        # The time until now was no wait for a task.
        self._clock.begin()
        return fetcher


class TimingHere(WorkerOption):
    """Notes the times of each batch that the caller's process makes.

    Args:
        recorder: Where they are noted.
        is_iterable: True for a dataset without indices.
    """

    position = Position.CLOCK

    def __init__(self, recorder: _native.Recorder, is_iterable: bool) -> None:
        self._recorder = recorder
        self._clock = _native.WorkerClock()
        self._is_iterable = is_iterable

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _native.TimedFetch(self._recorder, self._clock, fetcher, self._is_iterable)

    def fill(self, samples: SampleFetcher) -> None:
        _time_collation(self._clock, samples.torchs)


def _time_collation(clock: _native.WorkerClock, fetcher: Any) -> None:
    """Puts a clock before the ``collate_fn`` of torch's fetcher; another one may have none."""
    collate = getattr(fetcher, "collate_fn", None)
    if collate is not None:
        fetcher.collate_fn = _native.TimedCollate(clock, collate)


class _Fetched:
    """A stage that calls a function when a batch comes.

    Args:
        note: The function.
    """

    position = StagePosition.FETCHED

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def around(self, take: Take) -> Take:
        return functools.partial(self._next, take)

    def _next(self, take: Take, iterator: OurIterator) -> Any:
        batch = take(iterator)
        self._note()
        return batch


def _goes(loader: TorchLoader, options: Options, **change: Any) -> bool:
    """True if the loader takes the change of an option."""
    try:
        check(loader, dataclasses.replace(options, **change))
    except ValueError:
        return False
    return True


def _pins(loader: TorchLoader) -> bool:
    return bool(loader.pin_memory) and torch.accelerator.is_available()


def epoch_stats(loader: object) -> EpochStats:
    """Returns the figures of the newest epoch of ``loader``, as ``loader.epoch_stats()`` does.

    Args:
        loader: A ``ringloader.DataLoader`` with ``stats=True``. After ``ringloader.install(stats=True)``,
            also any torch loader.

    Raises:
        RuntimeError: If the loader's last epoch had no ``stats=True``; if ``ringloader.uninstall`` was called
            since; if there was no epoch yet.
    """
    note = notes.of_or_behind(loader)
    recording: Recording | None = None if note is None else note.more.get("recording")
    found = None if note is None or recording is None else recording.figures(note.path)
    if found is not None:
        return found
    raise RuntimeError(
        f"no times are known of the last epoch of {loader!r:.200}: pass stats=True to ringloader.DataLoader, "
        "or to ringloader.install for loaders of other classes, and iterate the loader before; ask before "
        "ringloader.uninstall"
    )
