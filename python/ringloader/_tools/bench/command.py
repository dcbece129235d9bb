"""``python -m ringloader bench``: compares batches, measures in rounds, and prints the results."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringloader._native as _native
from ringloader._common import output
from ringloader._tools.bench import batches, child, measure, results
from ringloader._tools.bench.arguments import Arguments, BenchError, Configuration, RunError
from ringloader._tools.bench.results import Row

_NAME = "python -m ringloader bench"


def run(given: Arguments) -> int:
    """Runs the command, and returns its exit status."""
    if not _native.SUPPORTED:
        output.complain(
            f"{_NAME}: error: bench compares torch's loader with ringloader's, which needs Linux\n"
        )
        return 2
    # SIGTERM, which `timeout` sends, ends the processes as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _Bench(given).run()
    except BenchError as error:
        output.complain(f"{error.users}{_NAME}: error: {error.text}\n")
        return 2
    except OSError as error:
        output.complain(f"{_NAME}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        output.complain(f"{_NAME}: interrupted\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


class _Bench:
    def __init__(self, given: Arguments) -> None:
        self._given = given
        self._measured: results.Measurements = {one: {} for one in given.configurations}
        # The first error of each configuration: it is not tried again.
        self._failed: dict[Configuration, RunError] = {}

    def run(self) -> int:
        given = self._given
        same, comparison = self._compare()
        for number in range(given.rounds):
            # The order turns, so that none always follows the same one.
            first = number % len(given.configurations)
            for configuration in given.configurations[first:] + given.configurations[:first]:
                found = self._call(configuration, measure.measure, given.seconds, given.step)
                if found is not None:
                    self._measured[configuration][number] = found
        rows = results.rows(self._measured)
        best, recommended = results.best(rows), results.recommended(rows)
        if best is None or recommended is None:
            raise self._first_failure()
        verdict = self._call(best.configuration, measure.verdict, given.seconds, given.step)
        row, reason = recommended
        lines = [results.table(rows), "", comparison, *self._notes(rows)]
        if verdict is not None:
            if "num_workers" in verdict["change"]:
                # The number that was measured to be enough is recommended below, and no other one.
                verdict |= {"text": f"{verdict['text'].partition('. ')[0]}.", "gain": None, "change": {}}
            lines.append(f"Verdict with {best.configuration.in_words}: {verdict['text']}")
        lines.append(f"Recommended: {row.configuration.in_words}: {reason}.")
        output.write("\n".join([*lines, ""]))
        if given.json is not None:
            data = results.to_dict(rows, same, row.configuration, verdict)
            Path(given.json).write_text(f"{json.dumps(data, indent=2)}\n")
        return int(same is False)

    def _call(self, configuration: Configuration, function: Callable[..., Any], *rest: Any) -> Any:
        """Calls a function with the target and a configuration in a process; None if that fails."""
        if configuration in self._failed:
            return None
        if sys.stderr is not None and sys.stderr.isatty():
            output.complain(f"running {configuration}: {function.__name__}\n")
        try:
            return child.call(function, self._given.target, configuration, *rest)
        except RunError as error:
            self._failed[configuration] = error
            return None

    def _compare(self) -> tuple[bool | None, str]:
        """Compares the batches of both loaders with the most workers; None where that says nothing."""
        ours = max(
            (one for one in self._given.configurations if one.loader == "ringloader" and not one.is_auto),
            key=lambda one: one.number,
        )
        torchs = Configuration("torch", ours.num_workers)
        where = f"with {ours.in_words}"
        theirs, mine = (self._call(one, batches.described) for one in (torchs, ours))
        if theirs is None or mine is None:
            return None, f"Batches: not compared {where}, because one of the loaders failed."
        count = sum(1 for one, other in zip(theirs, mine, strict=False) if one and other)
        different = batches.difference(theirs, mine)
        if different is None:
            return True, f"Batches: the first {count} of both loaders are equal, {where}."
        again = self._call(torchs, batches.described)
        unlike = None if again is None else batches.difference(theirs, again)
        if unlike is not None:
            return None, (
                f"Batches: not comparable {where}: two runs of torch's own loader differ, at {unlike[0]}. "
                "Seed all that draws."
            )
        place, expected, got = different
        return False, f"Batches: DIFFERENT {where}: at {place} torch has {expected}, ringloader {got}."

    def _notes(self, rows: list[Row]) -> list[str]:
        notes = [f"{configuration} failed: {error.text}" for configuration, error in self._failed.items()]
        for configuration, rounds in self._measured.items():
            if configuration.is_auto and rounds:
                numbers = ", ".join(str(one.num_workers) for one in rounds.values())
                notes.append(f"{configuration} had {numbers} workers at the end of its rounds.")
            reasons = {one.reason: None for one in rounds.values() if one.path == "torch"}
            notes += [f"{configuration} ran torch's own loader: {reason}" for reason in reasons]
        ours, theirs = results.best(rows), results.best(rows, "torch")
        if ours and theirs and theirs.batches_per_second * results.NEAR > ours.batches_per_second:
            notes.append(
                f"torch's own loader was faster: {results.rate(theirs.batches_per_second)} batches a second "
                f"with {theirs.configuration.in_words}."
            )
        return notes

    def _first_failure(self) -> RunError:
        configuration, error = next(
            (one, error) for one, error in self._failed.items() if one.loader == "ringloader"
        )
        return RunError(f"{configuration} failed: {error.text}", error.users)
