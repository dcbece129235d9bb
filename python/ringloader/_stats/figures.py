"""The figures of an epoch, from what was noted of it."""

from __future__ import annotations

from typing import Any

from ringloader._report import report
from ringloader._stats import verdict
from ringloader._stats.epoch import EpochStats, SlowFetch, Verdict, WorkerStats
from ringloader._stats.recording import Recording

_SECOND = 1e-9


def epoch_stats(loader: object) -> EpochStats:
    """Returns the figures of the epoch of ``loader`` that runs or ran last, as ``loader.epoch_stats()``.

    Args:
        loader: A ``ringloader.DataLoader`` with ``stats=True``, or any torch loader while
            ``ringloader.install(stats=True)`` is in effect.

    Raises:
        RuntimeError: If the loader's last epoch had no ``stats=True``, or may have been one that was not
            seen, after ``ringloader.uninstall``; if the loader was not iterated yet.
    """
    noted = report.noted_behind(loader)
    if noted is not None and noted.recording is not None and noted.recording.is_last():
        return _figures(noted.recording, noted.path)
    raise RuntimeError(
        f"no times are known of the last epoch of {loader!r:.200}: pass stats=True to ringloader.DataLoader, "
        "or to ringloader.install for loaders of other classes, and iterate the loader before; ask before "
        "ringloader.uninstall"
    )


def _figures(recording: Recording, path: str) -> EpochStats:
    read: dict[str, Any] = recording.recorder.read()
    begun, first, last = read["begun"], read["first"], read["last"]
    seconds = (last - begun) * _SECOND
    startup = seconds if first is None else (first - begun) * _SECOND
    waiting = read["waiting"] * _SECOND
    decode, place, index = (time * _SECOND for time in read["main"])
    # There torch's own workers are at work, of which nothing is known.
    workers = [] if path == "torch" else read["workers"]
    made = EpochStats(
        path=path,
        num_workers=recording.setting.num_workers,
        batches=read["batches"],
        seconds=seconds,
        startup=startup,
        waiting=waiting,
        caller=max(seconds - startup - waiting, 0.0),
        main={"decode": decode, "place": place, "index": index},
        workers=tuple(
            WorkerStats(number, batches, *(time * _SECOND for time in times))
            for number, (batches, *times) in enumerate(workers)
        ),
        slowest=tuple(SlowFetch(time * _SECOND, *rest) for time, *rest in read["slowest"]),
        verdict=Verdict("unknown", ""),
        _trace=recording.recorder.trace(),
    )
    return verdict.judged(made, recording.setting, read["first_made"] * _SECOND, recording.shared_bytes)
