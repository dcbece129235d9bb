"""Each file of tests of the pretend accelerator, in a process of its own; parity tests whose loaders pin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerator import build
from accelerator.pinned import IS_NAMED

HERE = Path(__file__).parent
LIMIT_S = 1500
LONG = (pytest.mark.slow, pytest.mark.long)

# Files for `make test-long`: storms, sweeps, and options in pairs. Each option alone is in a file that stays.
SLOW = (
    "device_end",
    "device_errors",
    "device_findings",
    "device_storages",
    "device_streams",
    "device_transform",
    "interrupted_steps",
    "pinning_findings",
    "pinning_processes",
    "registration",
    "with_options",
)

# Files of tests/parity. Those that are left out ask for what pinning does not keep: views of memory that is
# shared, tensors without elements that grow, random batches all of which arrive.
PINNED_TOO = ["test_errors.py"]
PINNED_SLOW = [
    *(
        "test_changed_while_sent.py",
        "test_iteration.py",
        "test_kinds.py",
        "test_lifecycle.py",
        "test_order.py",
    ),
    *("test_ownership.py", "test_patched.py"),
]
# There a child would pin, of a process that has the device.
NOT_PINNED = "parity/test_lifecycle.py::test_a_loader_in_a_forked_process"


def _runs() -> list[Any]:
    """Pairs of a command's arguments and a mark expression."""
    runs = []
    for path in sorted(HERE.glob("test_*.py")):
        if path.name != Path(__file__).name:
            is_slow = path.stem.endswith(("_storm", *SLOW))
            marks = pytest.mark.slow if is_slow else ()
            runs.append(pytest.param([str(path)], "not slow", id=path.stem, marks=marks))
            if "mark.slow" in path.read_text():
                runs.append(pytest.param([str(path)], "slow", id=f"{path.stem}, slow", marks=LONG))
    for names, marks in ((PINNED_TOO, pytest.mark.slow), (PINNED_SLOW, LONG)):
        for name in names:
            # The first names this folder, so that pytest knows its options.
            arguments = ["--pinned", str(HERE / "conftest.py"), str(HERE.parent / "parity" / name)]
            arguments += ["--deselect", f"tests/{NOT_PINNED}"]
            runs.append(pytest.param(arguments, "", id=f"pinned {name}", marks=marks))
    return runs


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        build.library()
    except build.CannotBuildError as error:
        pytest.skip(f"the pretend accelerator cannot be built: {error}")


@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize(("arguments", "marked"), _runs())
def test_in_a_process(arguments: list[str], marked: str, request: pytest.FixtureRequest):
    option = request.config.getoption
    if request.node.get_closest_marker("long") and option("markexpr") != "long":
        pytest.skip("minutes: make accelerator-slow")
    if "--pinned" in arguments and IS_NAMED:
        pytest.skip("this torch pins by default for CUDA only")
    options = ["-q", "--pretend", "-m", marked, "--loader", option("--loader"), "--path", option("--path")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=HERE.parents[1],
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest.fail(done.stdout, pytrace=False)
    print(done.stdout.splitlines()[-1])  # noqa: T201
