"""Finds the limit of an epoch, and the change that helps.

INVARIANT: the page "Is it the loader?" states these rules.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from ringloader._features.rules import THREAD
from ringloader._features.stats.epoch import AS_GOOD, TIMES, EpochStats, Kind, Model, Verdict, in_words

# A nanosecond, in seconds.
_NANO = 1e-9
# Fewer batches say nothing of a step.
_FEWEST = 10
# The part of the time after the start in which the caller may wait for a loader that keeps up.
_KEEPS_UP = 0.1
# The part of a time that stands out.
_MOST = 0.5
# Thresholds: the share of the workers' time spent waiting for memory, and for tasks.
_ROOM, _IDLE = 0.15, 0.3
# A fetch holds others up if it takes this many times as long as usual in the fastest worker.
_UNEVEN = 2.0
# The part of the workers' time in which they compute that makes more workers than cores useless.
_COMPUTES = 0.4
# From this many batches on, start and end are a small part of the epoch, and all events too many to look at.
_LONG = 1000
# The suggested memory, as a multiple of the present one: how much is needed is not known.
_MORE_MEMORY = 4
# The seconds that the start of one worker takes, where none was measured.
_START = 0.02
# The seconds of `next` itself where there are no workers.
_NEXT = 1e-6
# The seconds of a batch's work above which its way from a worker is not the limit.
_QUICK = 200e-6

# Parts of the workers' work: the subject of a sentence, and a remedy other than more workers.
_WORK: dict[Kind, tuple[str, str]] = {
    "dataset": ("The dataset", "a cheaper dataset"),
    "collate": ("The `collate_fn`", "a cheaper collate_fn"),
    "send": ("Sending batches", "smaller batches, or tensors in place of other objects"),
}
# Work of the main process: the verb of a sentence, and what helps.
_MAIN = {
    "decode": ("unpacks batches", "fewer objects in a batch, such as tensors in place of lists of numbers"),
    "place": ("pins batches or moves them to the device", "fewer or smaller tensors in a batch"),
    "index": ("reads the sampler", "a sampler of torch's own, or a cheaper one"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a loader that a verdict depends on.

    Attributes:
        num_workers: Its workers.
        may_be_unordered: True if batches come in order, and workers with room could make more without it.
        persistent_workers: True if workers stay for the next epoch.
        is_iterable: True for a dataset without indices.
        moves: True if batches are pinned, or moved to a device.
        is_dispatch: True if one process reads the source for all workers.
        worker_method: ``"multiprocessing"`` or ``"thread"``.
        may_use_threads: True if the loader's other options go with threads for workers.
        may_be_at_once: True if a worker may make several samples at once, and makes one after another.
        may_prefetch: True if they go with a thread that decodes, and there is none.
        most_workers: The most workers that there may be; None for any number.
        cores: Processors that this process may use.
        window: Batches under way, where all workers make them together; None where each is one worker's.
    """

    num_workers: int
    may_be_unordered: bool
    persistent_workers: bool
    is_iterable: bool
    moves: bool
    is_dispatch: bool
    worker_method: str
    may_use_threads: bool
    may_prefetch: bool
    most_workers: int | None
    cores: int
    window: int | None = None
    may_be_at_once: bool = False


class Judge:
    """Judges an epoch.

    Args:
        stats: The figures, whose own verdict is not read.
        setting: The loader.
        first_made: The seconds that a worker took for the first batch.
        shared_bytes: Bytes of shared memory of all workers; 0 without such memory.
    """

    def __init__(self, stats: EpochStats, setting: Setting, first_made: float, shared_bytes: int) -> None:
        self._stats = stats
        self._setting = setting
        self._shared_bytes = shared_bytes
        workers = setting.num_workers
        self._is_of_threads = workers > 0 and setting.worker_method == THREAD
        # Until the last worker had started.
        has_events = workers > 0 and sum(one.batches for one in stats.workers) <= _LONG
        others = self._waited_for_others() if has_events and workers > 1 else 0.0
        start = max(stats.startup - first_made - stats.main["index"], 0.0)
        self._start = start + others if workers else 0.0
        self._end = self._waited_for_the_end() if has_events else 0.0
        self._waiting = stats.waiting - others - self._end
        self._main = sum(stats.main.values())
        self._sums = {name: sum(getattr(one, name) for one in stats.workers) for name in TIMES}
        self._work = sum(self._sums[kind] for kind in _WORK)
        self._made = max(sum(one.batches for one in stats.workers), 1)
        behind = max(stats.batches - 1, 0)
        self._model = Model(
            batches=behind,
            caller=stats.caller / max(behind, 1),
            main=self._main / max(stats.batches, 1),
            work=self._work / self._made,
            cpu=min(self._sums["cpu"], self._work) / self._made,
            start=(self._start + self._end) / workers if workers else _START,
            # A dataset that computes in Python holds the interpreter lock.
            cores=1 if self._is_of_threads else setting.cores,
        )

    def verdict(self) -> Verdict:
        """Returns the verdict."""
        stats = self._stats
        if stats.path == "torch":
            return self._verdict(
                "unknown",
                f"next took {in_words(stats.waiting)} of {in_words(stats.seconds)}. torch's own loader ran, "
                "whose workers are not seen.",
            )
        if self._start > _MOST * stats.seconds and stats.batches:
            return self._of_start()
        if stats.batches < _FEWEST:
            return self._unknown(f"{stats.batches} batches are too few to tell: {_FEWEST} are enough.")
        share = self._waiting / (self._waiting + stats.caller)
        if share < _KEEPS_UP:
            return self._verdict(
                "caller",
                f"The training step is the limit: the loader keeps up, and next took {share:.0%} of the time "
                "after the start.",
            )
        if self._main > _MOST * self._waiting:
            return self._of_main()
        if self._setting.num_workers == 0:
            # The first batch was made here too.
            return self._of_work(stats.startup + stats.waiting)
        time = self._work + self._sums["idle"] + self._sums["room"]
        if self._sums["room"] > _ROOM * time:
            return self._of_memory(time)
        if self._sums["idle"] > _IDLE * time:
            return self._of_idle_workers(time)
        return self._of_work(self._work)

    def _of_start(self) -> Verdict:
        stats = self._stats
        limit = f"The start took {in_words(self._start)} of {in_words(stats.seconds)}"
        if self._setting.persistent_workers:
            return self._verdict("startup", f"{limit}. Later epochs have their workers, and start at once.")
        return self._advice(
            "startup", f"{limit}. Keep the workers for the next epoch", persistent_workers=True
        )

    def _waited_for_others(self) -> float:
        """Returns the time in ``next`` after the first batch, until all workers had a task."""
        trace = self._stats._trace
        if trace.first is None:
            return 0.0
        began: dict[int, int] = {}
        for _, worker, (got, *_), _, _ in trace.fetches():
            began[worker] = min(got, began.get(worker, got))
        ready = max(began.values(), default=0)
        waited = 0
        for name, _, begun, ended in trace.events():
            if name == "wait" and begun >= trace.first:
                waited += max(min(ended, ready) - begun, 0)
        return waited * _NANO

    def _waited_for_the_end(self) -> float:
        """Returns the time in the last call of next, if it had no batch: workers that do not stay end."""
        if self._setting.persistent_workers or self._setting.is_iterable:
            return 0.0
        waits = [event for event in self._stats._trace.events() if event[0] == "wait"]
        if not waits or waits[-1][1] < self._stats.batches:
            return 0.0
        _, _, begun, ended = waits[-1]
        return float(ended - begun) * _NANO

    def _of_main(self) -> Verdict:
        stats, setting = self._stats, self._setting
        name = max(stats.main, key=stats.main.__getitem__)
        what, remedy = _MAIN[name]
        limit = (
            f"The main process is the limit: it {what} for {in_words(stats.main[name])}, and next "
            f"took {in_words(self._waiting)} after the start"
        )
        if name == "decode" and setting.may_prefetch:
            return self._advice("main", f"{limit}. Have a thread do it", main_prefetch=2)
        return self._verdict("main", f"{limit}. What helps is {remedy}.")

    def _of_memory(self, time: float) -> Verdict:
        limit = (
            f"Shared memory is the limit: workers waited for room for {self._sums['room'] / time:.0%} of "
            "their time, and the caller for them"
        )
        if not self._shared_bytes:
            return self._verdict("memory", f"{limit}.")
        return self._advice(
            "memory", f"{limit}. Give them more", max_shared_bytes=_MORE_MEMORY * self._shared_bytes
        )

    def _of_idle_workers(self, time: float) -> Verdict:
        """Returns the verdict on workers that wait for tasks while the caller waits for batches."""
        stats, setting = self._stats, self._setting
        idle = f"workers waited for tasks for {self._sums['idle'] / time:.0%} of their time, and the caller "
        mean = usual = self._sums["dataset"] / self._made
        if not setting.is_iterable:
            # The other workers can take over from a slow one.
            usual = min(worker.dataset / worker.batches for worker in stats.workers if worker.batches)
        if setting.window is not None:
            # Fetches are runs there, of about one length.
            usual = statistics.median(seconds for _, seconds in self._fetches())
        long = [seconds - usual for _, seconds in self._fetches() if seconds > _UNEVEN * usual]
        if sum(long) < _MOST * self._waiting:
            return self._of_handing(idle)
        if setting.num_workers == 1:
            # The worker waits for tasks while the caller has its batches: no worker waits for another.
            return self._of_work(self._work)
        longest = stats.slowest[0]
        if setting.window is not None:
            limit = (
                f"The window (prefetch_factor={setting.window}) waits for slow samples: {idle}for the "
                f"longest runs, up to {in_words(longest.seconds)} in batch {longest.batch} (usual are "
                f"{in_words(usual)})"
            )
            return self._advice(
                "order",
                f"{limit}. `slowest` names them. Let more batches be under way",
                prefetch_factor=2 * setting.window,
            )
        limit = (
            f"One is slow, and others idle behind it: {idle}for the longest fetches, up to "
            f"{in_words(longest.seconds)} in worker {longest.worker} (on average {in_words(mean)})"
        )
        if not setting.may_be_unordered:
            return self._verdict("order", f"{limit}. `slowest` names them.")
        return self._advice(
            "order",
            f"{limit}. Where the order of the batches does not matter, take them as they come",
            in_order=False,
        )

    def _of_handing(self, idle: str) -> Verdict:
        """Returns the verdict on batches that are made in less time than a worker's batch takes to come."""
        stats, model = self._stats, self._model
        # Without workers nothing is sent, nor decoded.
        here = dataclasses.replace(
            model,
            main=_NEXT + model.main - stats.main["decode"] / stats.batches,
            work=model.work - self._sums["send"] / self._made,
        ).seconds(0)
        to_come = self._waiting / model.batches
        if model.work > min(_QUICK, to_come) or here * AS_GOOD > stats.seconds:
            return self._unknown(f"Nothing stands out: {idle}waited too.")
        # A loader that says no number has a pool's.
        pool = {} if self._setting.most_workers is None else {"worker_pool": None}
        return self._faster(
            "send",
            f"Handing batches over is the limit: {idle}waited too. A batch takes {in_words(model.work)} to "
            f"make, and {in_words(to_come)} to come. Use larger batches, or no workers",
            here,
            num_workers=0,
            **pool,
        )

    def _of_work(self, whole: float) -> Verdict:
        kind = max(_WORK, key=self._sums.__getitem__)
        part = self._sums[kind]
        if part <= _MOST * whole:
            return self._unknown("Nothing stands out.")
        setting, model = self._setting, self._model
        name, cheaper = _WORK[kind]
        time = "the workers' time" if setting.num_workers else "the time in next"
        each = part / self._made
        limit = (
            f"{name} is the limit: {in_words(each)} a batch, {part / whole:.0%} of {time}, and the step "
            f"{in_words(model.caller)}"
        )
        if kind == "send" and setting.may_use_threads:
            return self._advice(
                kind,
                f"{limit}. Threads send nothing, if the dataset does not hold the interpreter lock",
                worker_method=THREAD,
            )
        if kind == "dataset" and setting.is_dispatch:
            return self._verdict(
                kind, f"{limit}. One process reads the source for any number of workers: a faster one helps."
            )
        number = model.fewest_workers(self._most_workers())
        if number > setting.num_workers and model.seconds(number) * AS_GOOD < self._stats.seconds:
            if kind == "dataset" and setting.may_be_at_once and model.cpu < _COMPUTES * model.work:
                limit += (
                    ". It mostly waits, and a worker can wait for many samples at once: worker_concurrency=16"
                )
            shares = ", if each worker reads its share of the samples" if setting.is_iterable else ""
            instead = "" if kind == "dataset" else f", or {cheaper}"
            return self._faster(
                kind, f"{limit}. Use more workers{shares}{instead}", model.seconds(number), num_workers=number
            )
        limit += ". More workers would not help"
        if self._is_of_threads:
            limit += ", if the dataset holds the interpreter lock (processes would)"
        return self._verdict(kind, f"{limit}: what helps is {cheaper}.")

    def _most_workers(self) -> int | None:
        """Returns the most workers to advise: the cores, unless workers mostly wait.

        Where other programs run too, a worker that is ready to run may not, which looks like waiting.
        """
        most, model = self._setting.most_workers, self._model
        if model.cpu < _COMPUTES * model.work:
            return most
        return model.cores if most is None else min(most, model.cores)

    def _fetches(self) -> list[tuple[int, float]]:
        """Returns the worker of each of the last batches, and the seconds that the dataset took for it."""
        return [
            (worker, (made - got - collate) * _NANO)
            for _, worker, (got, _, made, _), (collate, _), _ in self._stats._trace.fetches()
        ]

    def _unknown(self, text: str) -> Verdict:
        """Returns a verdict that names the largest figures."""
        stats = self._stats
        figures = {"startup": stats.startup, "waiting": stats.waiting, "caller": stats.caller}
        if stats.workers:
            figures |= {name: self._sums[name] for name in (*_WORK, "room")}
        near = sorted(figures, key=figures.__getitem__, reverse=True)[:3]
        largest = ", ".join(f"{name} ({in_words(figures[name])})" for name in near)
        return self._verdict("unknown", f"{text} Largest are {largest}.")

    def _faster(self, kind: Kind, text: str, after: float, **change: Any) -> Verdict:
        """Returns the advice of a change after which the epoch takes ``after`` seconds."""
        gain = self._stats.seconds / after
        return self._verdict(
            kind,
            f"{text}: {_named(change)} makes such an epoch about {gain:.1f} times as fast.",
            gain,
            change,
        )

    def _advice(self, kind: Kind, text: str, **change: Any) -> Verdict:
        """Returns the advice of a change whose gain only a try tells."""
        return self._verdict(kind, f"{text}: {_named(change)}.", None, change)

    def _verdict(
        self, kind: Kind, text: str, gain: float | None = None, change: dict[str, Any] | None = None
    ) -> Verdict:
        if self._setting.moves:
            text += " The step is the host's time: a device works on behind it."
        return Verdict(kind, text, gain, change or {})


def _named(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in change.items())
