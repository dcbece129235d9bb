"""The last batches of an epoch as Chrome trace events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ringloader._native as _native

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
