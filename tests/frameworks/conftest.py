"""The frameworks that are installed, and the comparison that all tests here make."""

from __future__ import annotations

import collections
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from frameworks import loader_ways, packages, pages
from parity import harness

# Nothing is fetched from a hub, and nothing kept in the user's home.
_hub = tempfile.TemporaryDirectory(prefix="hub")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=_hub.name, YOLO_OFFLINE="true", YOLO_CONFIG_DIR=_hub.name)
# Read when keras is imported.
os.environ["KERAS_BACKEND"] = "torch"

# Filled by pytest_configure; what is in it is not even imported.
collect_ignore: list[str] = []


# Results of a run: file of tests, outcome of every test in it.
_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-versions",
        action="store_true",
        help="write the versions of the frameworks whose tests all passed into docs/frameworks",
    )
    parser.addoption(
        "--frameworks",
        metavar="NAME,...",
        help="only these, which must be installed; default: all, and where one is missing, none",
    )


def pytest_configure(config: pytest.Config) -> None:
    named = config.getoption("--frameworks", default=None)
    wanted = packages.wanted() if named is None else named.split(",")
    if unknown := set(wanted) - set(packages.FRAMEWORKS):
        raise pytest.UsageError(
            f"--frameworks: {', '.join(unknown)} is none of {', '.join(packages.FRAMEWORKS)}"
        )
    missing = packages.missing(wanted)
    if missing and named is not None:
        raise pytest.UsageError(f"--frameworks: not installed: {', '.join(missing)}")
    left_out = packages.FRAMEWORKS if missing else set(packages.FRAMEWORKS) - set(wanted)
    collect_ignore.extend(f"test_{file}.py" for file in left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = re.match(r"tests/frameworks/test_(\w+)\.py::", report.nodeid)
    if found and found[1] in packages.FRAMEWORKS and (report.when == "call" or report.outcome != "passed"):
        _outcomes[found[1]][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    say = terminalreporter.write_line
    if len(collect_ignore) == len(packages.FRAMEWORKS):
        missing = packages.missing(packages.wanted())
        say(f"tests/frameworks left out: {', '.join(missing)} not installed; `make frameworks` does so")
    named = pages.named()
    passed = [file for file, counts in _outcomes.items() if counts["passed"] and not counts["failed"]]
    for file, counts in _outcomes.items():
        name = packages.FRAMEWORKS[file]
        version = packages.version(name)
        remark = "" if named[file] == version else f"; docs/frameworks names {named[file]}"
        say(f"{name} {version}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}{remark}")
    if config.getoption("--write-versions", default=False):
        pages.write(passed)


@pytest.fixture(autouse=True)
def _as_it_was() -> None:
    """Frameworks change the process for good: variables, signal handlers, ``sys.path``."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equal to the last bit, whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forget_accelerates_state() -> Iterator[None]:
    """Drops, after the test, what accelerate keeps for the process."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(params=loader_ways.OURS)
def way_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The program, and if it gets batches.
Compare = Callable[..., loader_ways.Way]


@pytest.fixture
def compare(way_name: str) -> Compare:
    """Runs a program without us and with us; asserts that it returns the same, and that we did the work.

    The program gets the way, returns plain values, and starts at least one loader with workers; with
    `workers=0`, only loaders without. A test that one way does not reach is marked with
    `loader_ways.INSTALL_ONLY` or `loader_ways.CLASS_ONLY`.
    """

    def run(
        program: Callable[[loader_ways.Way], Any], gets_batches: bool = True, workers: int = 2
    ) -> loader_ways.Way:
        with loader_ways.use("torch") as torchs:
            expected = program(torchs)
        assert expected, "the program returned nothing to compare"
        assert torchs.made == [], "ringloader had a part in what was to be torch's own"
        with loader_ways.use(way_name) as ours:
            actual = program(ours)
        assert actual == expected
        assert ours.reports, "ringloader.reports() knows no loader"
        assert {one.path for one in ours.reports} <= {harness.expected_path, "single-process"}, ours.reports
        if not workers:
            assert torchs.torchs == 0
            assert {made.path for made in ours.made} == {"single-process"}, ours.made
            assert len(ours.made) == torchs.without_workers, "not every iterator was ours"
            return ours
        with_workers = [made for made in ours.made if made.reason != "num_workers is 0"]
        assert {made.path for made in with_workers} == {harness.expected_path}, with_workers
        assert len(with_workers) == torchs.torchs, "not every iterator with workers was ours"
        assert (ours.batches > 0) == gets_batches
        return ours

    return run
