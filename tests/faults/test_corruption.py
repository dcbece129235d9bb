"""Shared memory that something has written over: an error or a batch, and no crash.

``rust/core/tests/corruption.rs`` has the structures, this the tables of batches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringloader._common import pickling

pytestmark = pytest.mark.rings_only

_TESTS = Path(__file__).resolve().parent.parent


def overwrite(seconds: float) -> tuple[int, int]:
    """Returns the number of bytes that were overwritten, and of batches that were refused for it."""
    ended = subprocess.run(
        [sys.executable, "-m", "faults.overwritten_tables", str(seconds)],
        cwd=_TESTS,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        capture_output=True,
        text=True,
        timeout=120 + seconds,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    sys.stdout.write(ended.stdout)
    counts = re.match(r"(\d+) of \d+ overwritten, (\d+) refused", ended.stdout)
    assert counts, ended.stdout
    return int(counts[1]), int(counts[2])


@pytest.mark.slow
def test_each_byte_of_a_table_is_refused_or_gives_a_batch():
    overwritten, refused = overwrite(8)
    assert overwritten > 200
    assert overwritten // 4 < refused < overwritten


@pytest.mark.parametrize("name", ["|O", "O", "O,f8"])
def test_bytes_are_never_taken_for_addresses(name):
    tag = pickling._BY_NAME + name.encode()
    with pytest.raises(TypeError, match="holds dtype"):
        pickling.array_dtype(tag)
    assert pickling.array_dtype(pickling._BY_NAME + b"<f8") == np.dtype("<f8")
