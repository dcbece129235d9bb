"""The rounds of one workload: batches compared first, then every row timed in turn."""

from __future__ import annotations

from typing import Any

from .ideal import IDEALS
from .interpreter import Interpreter
from .loaders import BASELINE, LOADERS
from .processes import ProcessFailedError, call_in_process, named
from .report import Row
from .workloads import Workload


class Runner:
    """Runs the calls that a row is made of, each in a process of its own, where its package is.

    Args:
        method: see ``call_in_process``.
        elsewhere: for loaders that need an environment of their own.
    """

    def __init__(self, method: str, elsewhere: Interpreter) -> None:
        self.method = method
        self.elsewhere = elsewhere

    def fingerprints(self, row: Row, batches: int) -> list[str]:
        """The first batches of a row; see ``verify``."""
        return list(self._call("verify.fingerprints", row, batches))

    def timed_run(self, row: Row, seconds: float, rest: bool) -> dict[str, Any]:
        """One run; see ``measure``."""
        more = () if row.loader in IDEALS else (None, rest)
        return dict(self._call("measure.timed_run", row, seconds, *more))

    def _call(self, function: str, row: Row, *amounts: float | None) -> Any:
        if row.loader in IDEALS:
            function = f"ideal.{function.split('.')[1]}"
        elif LOADERS[row.loader].own_environment:
            return self.elsewhere.call(self.method, function, row.loader, row.workload, *amounts)
        return call_in_process(self.method, named, function, row.loader, row.workload, *amounts)


def verify(workload: Workload, rows: list[Row], runner: Runner, batches: int) -> None:
    """Compares the first batches of every row with the baseline's; a row that differs is not timed."""
    found: dict[str, list[str]] = {}
    for row in rows:
        loader = LOADERS.get(row.loader)
        if workload.random and loader is not None and (loader.threads or loader.without_workers):
            row.content = "not compared: random samples, drawn by each worker"
            continue
        try:
            found[row.loader] = runner.fingerprints(row, batches)
        except ProcessFailedError as error:
            row.error = str(error)
    _compare(rows, found)


def _compare(rows: list[Row], found: dict[str, list[str]]) -> None:
    """Sets ``content`` of every row, and ``error`` where batches differ from the baseline's."""
    expected = found.get(BASELINE)
    for row in rows:
        if row.loader not in found:
            continue
        if row.loader == BASELINE:
            row.content = "is torch's"
        elif expected is None:
            row.error = f"nothing to compare with: {BASELINE} failed"
        elif found[row.loader] == expected:
            row.content = f"yes ({len(expected)})"
        else:
            pairs = enumerate(zip(found[row.loader], expected, strict=True))
            differing = [number for number, (ours, theirs) in pairs if ours != theirs]
            row.content = "NO"
            row.error = (
                f"{len(differing)} of {len(expected)} batches differ, the first is number {differing[0]}"
            )


def measure(workload: Workload, rows: list[Row], runner: Runner, rounds: int, seconds: float) -> None:
    """Times the rows in turn, in an order that goes forth, back, back, forth.

    So it turns from one time to the next for the loaders of every second round too. The others rest once.
    """
    for number in range(rounds):
        for row in reversed(rows) if (number + 1) // 2 % 2 else rows:
            every = IDEALS[row.loader] if row.loader in IDEALS else LOADERS[row.loader].every
            if row.error is None and number % every == 0:
                try:
                    rest = number == 0 and every == 1
                    timing = runner.timed_run(row, seconds * workload.seconds, rest)
                    row.rounds.append({"round": number, **timing})
                except ProcessFailedError as error:
                    row.error = str(error)
                    row.rounds.clear()
