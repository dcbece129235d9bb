"""The figures of an epoch, by ``DataLoader(stats=True)``: what took the time, and what to change.

Also a model of the epoch, and its last batches as Chrome trace events.
INVARIANT: the page "Is it the loader?" states the model.
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ringloader._native as _native
from ringloader._common.attributes import shown

Kind = Literal["caller", "dataset", "collate", "send", "main", "memory", "order", "startup", "unknown"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The limit of an epoch, and the change that helps.

    Attributes:
        kind: One of these words:

            - ``"caller"``: the training step is the limit, and the loader keeps up.
            - ``"dataset"``, ``"collate"``, ``"send"``: this part of the workers' work is the limit.
            - ``"main"``: the main process is the limit: it reads the sampler, and decodes or moves batches.
            - ``"memory"``: workers wait for memory while the caller waits.
            - ``"order"``: a worker or a sample is slow, and others wait for it.
            - ``"startup"``: the start took most of the epoch.
            - ``"unknown"``: there were too few batches, or no clear cause.
        text: One or two sentences, with the figures and what to change.
        gain: The factor by which the epoch would be shorter with another number of workers, by the model of
            the page guides/is_it_the_loader.md. None for other changes, which the model does not predict.
        change: The change as arguments of the loader.
    """

    kind: Kind
    text: str
    gain: float | None = None
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerStats:
    """The times of one worker in an epoch, in seconds, of the batches that have arrived.

    Attributes:
        id: The worker's number.
        batches: Batches that the worker has made.
        idle: Time without a task.
        dataset: Time in the dataset: ``dataset[i]``, ``__getitems__``, or the iterator's ``next``.
        collate: Time in ``collate_fn``.
        send: Time for encoding and copying batches.
        room: Time of waiting for memory.
        cpu: Processor time of all this.
        under_way: The largest number of samples at the same time; 0 if it is not known, as for Ray's workers.
    """

    id: int
    batches: int
    idle: float
    dataset: float
    collate: float
    send: float
    room: float
    cpu: float
    under_way: int = 1


@dataclasses.dataclass(frozen=True)
class SlowFetch:
    """One of the slowest batches of an epoch.

    Attributes:
        seconds: The time in the dataset.
        worker: The worker's number.
        batch: The batch's number in the epoch, from 0 on.
        indices: The indices of the batch; None for an iterable dataset.
    """

    seconds: float
    worker: int
    batch: int
    indices: Any


@dataclasses.dataclass(frozen=True)
class WorkersChange:
    """A change of the number of workers, with ``num_workers="auto"``.

    Attributes:
        seconds: The time since ``iter``.
        num_workers: The new number.
        why: The reason, with the measurements.
    """

    seconds: float
    num_workers: int
    why: str


@dataclasses.dataclass(frozen=True)
class EpochStats:
    """The figures of an epoch, until its last call of ``next``. All times are seconds.

    ``startup``, ``waiting`` and ``caller`` add up to ``seconds``.

    Attributes:
        path: The path of the batches, as ``ringloader.report`` names it.
        num_workers: The number of workers; with ``num_workers="auto"`` the last one.
        batches: Batches that ``next`` has returned.
        seconds: Time since ``iter``.
        startup: Time until the first batch was returned.
        waiting: Time in ``next`` after the first batch.
        caller: Time between the calls of ``next``: the training step. It does not include work of a device
            that continues after the step.
        main: Work of the main process: ``"decode"``, ``"place"`` (pinning, copies to a device,
            ``device_transform``) and ``"index"`` (the sampler). Most of it is part of the time in ``next``.
        workers: The workers. Without workers, one entry with ``id`` 0, for the main process. On torch's own
            path, none.
        slowest: The ten slowest batches, the slowest first.
        verdict: The limit of the epoch, and what to change.
        changes: Changes of the number of workers in the epoch, with ``num_workers="auto"``.
    """

    path: str
    num_workers: int
    batches: int
    seconds: float
    startup: float
    waiting: float
    caller: float
    main: Mapping[str, float]
    workers: tuple[WorkerStats, ...]
    slowest: tuple[SlowFetch, ...]
    verdict: Verdict
    changes: tuple[WorkersChange, ...] = ()
    _trace: Any = dataclasses.field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as a dict for JSON. An index that JSON does not know becomes text."""
        # `asdict` would copy indices of any kind.
        found = dataclasses.asdict(dataclasses.replace(self, slowest=(), _trace=None))
        del found["_trace"]
        found["slowest"] = [{**vars(one), "indices": _as_json(one.indices)} for one in self.slowest]
        copied: dict[str, Any] = json.loads(json.dumps(found))
        return copied

    def save_trace(self, path: Any) -> None:
        """Writes the last 10,000 batches as Chrome trace events, for Perfetto and ``chrome://tracing``.

        The trace has a track for the main process and one for each worker. It uses the same clock as
        ``torch.profiler``, so you can merge both files.

        Args:
            path: The file, as ``open`` takes it.

        Raises:
            OSError: If the file cannot be written.
            RuntimeError: If this comes from a pickle, which has the figures only.
        """
        if self._trace is None:
            raise RuntimeError("a pickle has no trace: save_trace(path) in the process that has measured")

        save(self._trace, path, [(one.seconds, one.num_workers) for one in self.changes])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trace": None}

    # The text that a prompt and a notebook show, and that `str` gives.
    def __repr__(self) -> str:
        main = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.main.items())
        where = f"path {self.path}, num_workers={self.num_workers}"
        lines = [self._summary(f" ({where})"), f"main process: {main}"]
        if self.workers:
            lines.append("worker" + "".join(f"{name:>9}" for name in ("batches", *TIMES)))
        for worker in self.workers:
            times = "".join(f"{getattr(worker, name):9.3f}" for name in TIMES)
            lines.append(f"{worker.id:6}{worker.batches:9,}{times}")
        lines += [f"{one.num_workers} workers from {one.seconds:.3f} s on: {one.why}" for one in self.changes]
        return "\n".join([*lines, f"{self.verdict.kind}: {self.verdict.text}"])

    def _repr_html_(self) -> str:
        """Returns a bar for each worker, and the verdict."""
        longest = max((sum(getattr(worker, name) for name in _COLOURS) for worker in self.workers), default=0)
        rows = []
        for worker in self.workers:
            parts = [
                f'<div title="{name} {getattr(worker, name):.3f} s" style="background:{colour};'
                f'width:{getattr(worker, name) / (longest or 1.0):.2%}"></div>'
                for name, colour in _COLOURS.items()
            ]
            rows.append(
                '<div style="display:flex;height:1.2em;margin:2px 0"><span style="width:6em">'
                f'worker {worker.id}</span><div style="display:flex;flex:1">{"".join(parts)}</div></div>'
            )
        legend = " ".join(
            f'<span style="color:{colour}">&#9632;</span> {name}' for name, colour in _COLOURS.items()
        )
        verdict = html.escape(f"{self.verdict.kind}: {self.verdict.text}")
        return f"<div><p>{self._summary()}</p>{''.join(rows)}<p>{legend}</p><p>{verdict}</p></div>"

    def _summary(self, where: str = "") -> str:
        return (
            f"{self.batches:,} batches in {self.seconds:.3f} s{where}: startup {self.startup:.3f}, waiting "
            f"{self.waiting:.3f}, caller {self.caller:.3f}"
        )


# The times of a worker, in the order of the table.
TIMES = ("idle", "dataset", "collate", "send", "room", "cpu")
# The times that a bar shows.
_COLOURS = {
    "dataset": "#4c78a8",
    "collate": "#f58518",
    "send": "#54a24b",
    "room": "#e45756",
    "idle": "#d9d9d9",
}


# An epoch that is longer than the shortest by at most this part is as good, if it needs fewer workers.
AS_GOOD = 1.05
_MOST_WORKERS = 64
# The seconds of the main process to hand a task to a worker and to get its batch.
_HANDING = 20e-6


@dataclasses.dataclass(frozen=True)
class Model:
    """An epoch by its parts, in seconds for each batch.

    Attributes:
        batches: Batches behind the first.
        caller: The training step.
        main: Work of the main process in ``next``.
        work: Work of the workers.
        cpu: Processor time of that.
        start: The start of one worker; of the whole epoch.
        cores: Processors.
        handing: Work of the main process where there are workers.
    """

    batches: int
    caller: float
    main: float
    work: float
    cpu: float
    start: float
    cores: int
    handing: float = _HANDING

    def seconds(self, workers: int) -> float:
        """Returns the length of the epoch with a number of workers."""
        here = self.caller + self.main
        if workers == 0:
            step = here + self.work
        else:
            step = max(here + self.handing, self.work / workers, self.cpu / self.cores)
        return self.start * workers + self.work + self.batches * step

    def fewest_workers(self, most: int | None = None) -> int:
        """Returns the smallest number of workers with which the epoch is about as short as it may be.

        Args:
            most: The most workers that there may be.
        """
        numbers = range(1, (most or max(_MOST_WORKERS, self.cores)) + 1)
        shortest = min(map(self.seconds, numbers))
        return next(number for number in numbers if self.seconds(number) <= shortest * AS_GOOD)


def in_words(seconds: float) -> str:
    """Returns a time with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.0f} µs"


def _as_json(index: Any) -> Any:
    try:
        return json.loads(json.dumps(index, default=_part_as_json, allow_nan=False))
    except Exception:
        # A key that is no text, NaN, a list in itself, or an object whose own code raises.
        return shown(index)


def _part_as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else shown(value)


# In seconds. torch's profiler counts from the last multiple of it since 1970, and says so in its file.
_THREE_MONTHS = 7_889_238

# A stretch of time: the track, a name, beginning and length in nanoseconds, and arguments.
_Event = tuple[int, str, int, int, dict[str, Any]]


def save(trace: _native.Trace, path: Any, changes: Iterable[tuple[float, int]] = ()) -> None:
    """Writes the events to a file.

    Args:
        trace: The events.
        path: The file.
        changes: When the number of workers changed, in seconds since the epoch began, and to which one.
    """
    base = time.time_ns() // 10**9 // _THREE_MONTHS * _THREE_MONTHS * 10**9
    # From the monotonic clock to the file's times.
    offset = time.time_ns() - time.monotonic_ns() - base
    process = f"ringloader {os.getpid()}"
    found = [*_of_main(trace), *_of_workers(trace)]
    names = {0: "main process"} | {track: f"worker {track - 1}" for track, *_ in found if track}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}
        for track, name in names.items()
    ]
    events += [
        {
            "ph": "X",
            "cat": "ringloader",
            "name": name,
            "pid": process,
            "tid": track,
            "ts": (begun + offset) / 1000,
            "dur": length / 1000,
            "args": args,
        }
        for track, name, begun, length, args in found
    ]
    events += [
        {
            "ph": "C",
            "cat": "ringloader",
            "name": "num_workers",
            "pid": process,
            "ts": (trace.begun + seconds * 1e9 + offset) / 1000,
            "args": {"num_workers": number},
        }
        for seconds, number in changes
    ]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    Path(path).write_text(json.dumps(content))


def _of_main(trace: _native.Trace) -> Iterator[_Event]:
    first = trace.first
    if first is None:
        return
    yield 0, "startup", trace.begun, first - trace.begun, {}
    # A batch is decoded, or placed, in up to two steps.
    steps: dict[tuple[str, int], list[int]] = {}
    # The end of the last call of `next`. Of a long epoch, the first events are not kept.
    before: int | None = None
    for name, batch, begun, ended in trace.events():
        if name != "wait":
            step = steps.setdefault((name, batch), [begun, 0])
            step[1] += ended - begun
        elif begun >= first:
            if batch == 1:
                before = first
            if before is not None:
                yield 0, "caller", before, begun - before, {"batch": batch - 1}
            yield 0, name, begun, ended - begun, {"batch": batch}
            before = ended
    for (name, batch), (begun, length) in steps.items():
        yield 0, name, begun, length, {"batch": batch}


def _of_workers(trace: _native.Trace) -> Iterator[_Event]:
    for batch, worker, (got, collating, made, sent), (collate, room), indices in trace.fetches():
        track = worker + 1
        args: dict[str, Any] = {"batch": batch, "indices": indices} if indices else {"batch": batch}
        yield track, "dataset", got, (collating or made) - got, args
        if collating:
            yield track, "collate", collating, collate, args
        if room:
            yield track, "room", made, room, args
        yield track, "send", made + room, sent - made - room, args
