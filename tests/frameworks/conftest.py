"""Which frameworks are installed, and the comparison that every test here makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from frameworks import packages, ways
from parity import harness

# A file whose packages are missing is not even imported.
collect_ignore = [f"{file}.py" for file in packages.files_without_packages()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    missing = packages.missing()
    if missing:
        terminalreporter.write_line(
            f"tests/frameworks: {len(collect_ignore)} files left out, not installed: {', '.join(missing)} "
            "(`make frameworks` installs them)"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equal to the last bit, whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ways.OURS)
def way_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Compare = Callable[[Callable[[ways.Way], Any]], ways.Way]


@pytest.fixture
def compare(way_name: str) -> Compare:
    """Runs a program without us and with us; asserts that it returns the same, and that we did the work.

    The program gets the way, returns plain values, and starts at least one loader with workers. A test that
    one way does not reach is marked `@pytest.mark.parametrize("way_name", ["install"], indirect=True)`.
    """

    def run(program: Callable[[ways.Way], Any]) -> ways.Way:
        with ways.use("torch") as torchs:
            expected = program(torchs)
        assert expected, "the program returned nothing to compare"
        assert torchs.made == [], "ringloader had a part in what was to be torch's own"
        with ways.use(way_name) as ours:
            actual = program(ours)
        assert actual == expected
        with_workers = [made for made in ours.made if made.reason != "num_workers is 0"]
        assert {made.path for made in with_workers} == {harness.expected_path}, with_workers
        assert len(with_workers) == torchs.torchs, "not every iterator with workers was ours"
        assert ours.batches > 0
        return ours

    return run
