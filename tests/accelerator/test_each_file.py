"""Each file of tests of the pretend accelerator, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerator import build

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
LIMIT_S = 600


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        build.library()
    except build.CannotBuildError as error:
        pytest.skip(f"the pretend accelerator cannot be built: {error}")


@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize("name", FILES)
def test_file(name: str, request: pytest.FixtureRequest):
    option = request.config.getoption
    same = ("-m", option("markexpr"), "--loader", option("--loader"), "--path", option("--path"))
    command = [sys.executable, "-m", "pytest", "-q", "--pretend", *same, str(HERE / name)]
    done = subprocess.run(
        command,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest.fail(done.stdout, pytrace=False)
