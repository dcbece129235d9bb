"""The last batches of an epoch as Chrome trace events."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ringloader._native as _native

# In seconds. torch's profiler counts from the last multiple of it since 1970, and says so in its file.
_THREE_MONTHS = 7_889_238

_Event = dict[str, Any]


def save(trace: _native.Trace, path: Any) -> None:
    """Writes the events to a file."""
    base = time.time_ns() // 10**9 // _THREE_MONTHS * _THREE_MONTHS * 10**9
    tracks = _Tracks(time.time_ns() - time.monotonic_ns() - base)
    tracks.name(0, "main process")
    _add_main(tracks, trace)
    _add_workers(tracks, trace)
    content = {"traceEvents": tracks.events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    Path(path).write_text(json.dumps(content))


class _Tracks:
    """The events of all tracks.

    Args:
        offset: The nanoseconds from the monotonic clock to the file's times.
    """

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._process = f"ringloader {os.getpid()}"
        self._named: set[int] = set()
        self.events: list[_Event] = []

    def name(self, track: int, name: str) -> None:
        """Names a track, once."""
        if track not in self._named:
            self._named.add(track)
            args = {"name": name}
            self.events.append(
                {"ph": "M", "name": "thread_name", "pid": self._process, "tid": track, "args": args}
            )

    def add(self, track: int, name: str, begun: int, length: int, **args: Any) -> None:
        """Adds an event of a track, in nanoseconds."""
        self.events.append(
            {
                "ph": "X",
                "cat": "ringloader",
                "name": name,
                "pid": self._process,
                "tid": track,
                "ts": (begun + self._offset) / 1000,
                "dur": length / 1000,
                "args": args,
            }
        )


def _add_main(tracks: _Tracks, trace: _native.Trace) -> None:
    first = trace.first
    if first is None:
        return
    tracks.add(0, "startup", trace.begun, first - trace.begun)
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
                tracks.add(0, "caller", before, begun - before, batch=batch - 1)
            tracks.add(0, name, begun, ended - begun, batch=batch)
            before = ended
    for (name, batch), (begun, length) in steps.items():
        tracks.add(0, name, begun, length, batch=batch)


def _add_workers(tracks: _Tracks, trace: _native.Trace) -> None:
    for batch, worker, (got, collating, made, sent), (collate, room), indices in trace.fetches():
        track = worker + 1
        tracks.name(track, f"worker {worker}")
        args: _Event = {"batch": batch, "indices": indices} if indices else {"batch": batch}
        tracks.add(track, "dataset", got, (collating or made) - got, **args)
        if collating:
            tracks.add(track, "collate", collating, collate, **args)
        if room:
            tracks.add(track, "room", made, room, **args)
        tracks.add(track, "send", made + room, sent - made - room, **args)
