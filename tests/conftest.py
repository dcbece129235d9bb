"""Parts that all Python tests share: the class under test, a time limit, a check that no process is left."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data

from faults.proc import wait_without_children
from parity import harness
from programs import client, huge_pages, process_state

DEFAULT_LIMIT_S = 180.0
# Cases of one test that `make test` runs; the others are slow.
MOST_CASES = 2
# Files whose tests are about how workers start.
_ABOUT_SPAWN = {
    "test_iteration.py",
    "test_notebooks.py",
    "test_shared_args.py",
    "test_spawn_server.py",
    "test_spawned.py",
    "test_start.py",
}
# Of a test without parameters.
_NO_CALL = SimpleNamespace(params={})


class Hung(BaseException):
    """No `Exception`, so that no test and no loader takes it for one of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loader",
        choices=("ringloader", "torch"),
        default="ringloader",
        help="the class under test; `torch` compares torch with itself, which tests the tests",
    )

    parser.addoption(
        "--path",
        choices=(*harness.PATHS, harness.AHEAD, harness.TORCHS),
        default="native",
        help="the path of loaders with workers; `ahead` is native, with batches taken ahead of their turn, "
        "`torch` is for systems without rings",
    )

    parser.addoption(
        "--cold",
        action="store_true",
        help="starts test programs cold, as a user does; else a server that has imported torch forks them",
    )


@pytest.fixture(scope="session", autouse=True)
def _paths(request: pytest.FixtureRequest) -> Iterator[None]:
    chosen = request.config.getoption("--path")
    if request.config.getoption("--loader") == "torch":
        # Compared with itself, once.
        chosen = "native"
    harness.paths = (chosen,)
    with harness.taking(harness.paths[0]):
        yield


def pytest_configure(config: pytest.Config) -> None:
    # Python's default since 3.14 is forkserver, which takes no dataset that is defined in a function.
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
        # As ringloader does, unless torch's loader has started the server: then each worker imports torch.
        multiprocessing.set_forkserver_preload(
            ["__main__", "torch", "numpy.random", "ringloader._worker.entry"]
        )
    config.addinivalue_line("markers", "limit(seconds): how long a test may take before it counts as hung")
    config.addinivalue_line("markers", "cold(reason): its programs must be started cold")
    config.addinivalue_line("markers", "rings_only: says nothing about torch's own loader")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        values = getattr(item, "callspec", _NO_CALL).params.values()
        words = {word for value in values if isinstance(value, str) for word in value.split()}
        # With `spawn`, options do what they do with `forkserver`. torch's workers import torch for seconds.
        if "spawn" in words and item.path.name not in _ABOUT_SPAWN:
            item.add_marker(pytest.mark.slow)
    for cases in _cases_by_test(items).values():
        for item in cases[MOST_CASES:]:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--loader") != "torch":
        return
    skip = pytest.mark.skip(reason="says nothing about torch's own loader")
    for item in items:
        if item.get_closest_marker("rings_only"):
            item.add_marker(skip)


def _cases_by_test(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Returns the cases of each test that are not slow by themselves.

    They are in the order of a checksum, so the first few are always the same, and mix all parameters.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        # Each option of the table has a case of its own in `systems`.
        if item.get_closest_marker("slow") is None and item.path.parent.name != "systems":
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return tests


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    """Freezes again after the last test of a file: a test may have loaded more, such as torch's compiler."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()
    return done


# Modules that were loaded when the memory was last put into larger pages.
_collapsed = 0


def _freeze() -> None:
    """Freezes what is loaded, which lives to the end: a collection then takes a tenth of a second less."""
    global _collapsed
    gc.collect()
    gc.freeze()
    if len(sys.modules) > _collapsed + 100:
        _collapsed = len(sys.modules)
        huge_pages.collapse()


_times: collections.Counter[str] = collections.Counter()
_counts: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    room = "/".join(report.nodeid.split("/")[:2])
    _times[room] += report.duration
    _counts[room] += report.when == "call"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes the time of each folder, for the page for contributors. Test workers side by side each count."""
    for room, seconds in sorted(_times.items()):
        terminalreporter.write_line(f"{room:20} {_counts[room]:5} tests {seconds:6.0f} s")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    client.is_cold = item.config.getoption("--cold") or item.get_closest_marker("cold") is not None


@pytest.fixture(scope="session")
def loader_name(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--loader"))


@pytest.fixture(scope="session")
def loader_class(loader_name: str) -> type[torch.utils.data.DataLoader[Any]]:
    if loader_name == "torch":
        return torch.utils.data.DataLoader
    import ringloader

    return ringloader.DataLoader


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A test that leaves the process another one fails itself, and not a test after it."""
    before = process_state.of_this()
    yield
    changes = process_state.changes(before)
    assert not changes, f"the test leaves {changes}"


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest, _as_it_was: None) -> Iterator[None]:
    """A hang fails the test; one that does not even answer signals ends the run with every stack."""
    marker = request.node.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else DEFAULT_LIMIT_S

    def hung(_signum: int, _frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise Hung(f"the test took more than {limit} s")

    previous = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + 30, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def _no_process_left(_time_limit: None) -> Iterator[None]:
    yield
    gc.collect()
    left = wait_without_children(10)
    for pid in left:
        # The processes must fail this test only, not all behind it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    assert not left, f"worker processes outlive the test: {left}"
