"""``python -m ringloader bench``: compares batches, measures in rounds, and prints the results."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ringloader._native as _native
from ringloader._common import output
from ringloader._tools.bench import batches, child, measure, results
from ringloader._tools.bench.arguments import Arguments, BenchError, Configuration, RunError
from ringloader._tools.bench.results import Row

_NAME = "python -m ringloader bench"
# torch's and ringloader's batches, and torch's again if these differ.
_COMPARED = 3


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
        with _progress(_COMPARED + given.rounds * len(given.configurations) + 1) as begin:
            same, comparison = self._compare(begin)
            for number in range(given.rounds):
                # The order turns, so that none always follows the same one.
                first = number % len(given.configurations)
                for configuration in given.configurations[first:] + given.configurations[:first]:
                    begin(str(configuration))
                    self._measure(configuration, number)
            rows = results.rows(self._measured)
            best, recommended = results.best(rows), results.recommended(rows)
            if best is None or recommended is None:
                raise self._first_failure()
            begin(f"verdict of {best.configuration}")
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
        if given.plot is not None:
            results.draw(given.plot, rows, str(given.target))
        return int(same is False)

    def _measure(self, configuration: Configuration, number: int) -> None:
        given = self._given
        found = self._call(configuration, measure.measure, given.seconds, given.step)
        if found is not None:
            self._measured[configuration][number] = found

    def _call(self, configuration: Configuration, function: Callable[..., Any], *rest: Any) -> Any:
        """Calls a function with the target and a configuration in a process; None if that fails."""
        if configuration in self._failed:
            return None
        try:
            return child.call(function, self._given.target, configuration, *rest)
        except RunError as error:
            self._failed[configuration] = error
            return None

    def _compare(self, begin: Callable[[str], None]) -> tuple[bool | None, str]:
        """Compares the batches of both loaders with the most workers; None where that says nothing."""
        ours = max(
            (one for one in self._given.configurations if one.loader == "ringloader" and not one.is_auto),
            key=lambda one: one.number,
        )
        torchs = Configuration("torch", ours.num_workers)

        def described(configuration: Configuration) -> Any:
            begin(f"batches of {configuration}")
            return self._call(configuration, batches.described)

        where = f"with {ours.in_words}"
        theirs, mine = described(torchs), described(ours)
        if theirs is None or mine is None:
            return None, f"Batches: not compared {where}, because one of the loaders failed."
        count = sum(1 for one, other in zip(theirs, mine, strict=False) if one and other)
        different = batches.difference(theirs, mine)
        if different is None:
            return True, f"Batches: the first {count} of both loaders are equal, {where}."
        again = described(torchs)
        unlike = None if again is None else batches.difference(theirs, again)
        if unlike is not None:
            # The batches before that are the same in both runs of torch's.
            steady = [one for one, _ in itertools.takewhile(_is_equal, zip(theirs, again, strict=False))]
            if batches.difference(steady, mine) is None:
                return None, (
                    f"Batches: not comparable {where}: two runs of torch's own loader differ, at "
                    f"{unlike[0]}. Seed all that draws."
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


def _is_equal(pair: tuple[object, object]) -> bool:
    return pair[0] == pair[1]


@contextlib.contextmanager
def _progress(runs: int) -> Iterator[Callable[[str], None]]:
    """Shows how many runs are done, by tqdm if it is installed, where standard error is a terminal.

    Args:
        runs: The number of runs.

    Yields:
        A function that is called with the name of each run when it begins.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
    elif importlib.util.find_spec("tqdm") is None:
        output.complain(f"{runs} runs; with a progress bar: pip install 'ringloader[bench]'\n")
        yield lambda _: None
    else:
        with importlib.import_module("tqdm").tqdm(total=runs, leave=False, unit="run") as bar:

            def begin(name: str) -> None:
                bar.set_description(name)
                bar.update()

            yield begin
