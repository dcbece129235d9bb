"""Two ranks under torchrun, each of which runs one program in every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from frameworks import ways
from parity import harness

RANKS = 2
_TESTS = Path(__file__).resolve().parent.parent


def run_ranks(script: str, folder: Path, names: tuple[str, ...] = ways.OURS, seconds: float = 150) -> None:
    """Runs `frameworks/<script>` on two ranks; asserts that each way gave every rank what torch's gave it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    # A copy of the script would not do: what its workers import lies beside it.
    command += [str(_TESTS / "frameworks" / script), str(folder), "torch", *names]
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"the ranks hang\n{error.stdout}\n{error.stderr}") from None
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    check_ways(folder, names)


def check_ways(folder: Path, names: tuple[str, ...], unreached: tuple[str, ...] = ()) -> None:
    """Asserts that each way gave every rank what torch's gave it, and that `names` came to us.

    The ways in `unreached` must not: they are documented so.
    """
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert ranks[0]["torch"]["result"]["data"] != ranks[1]["torch"]["result"]["data"], "ranks share data"
    for rank in ranks:
        for name in (*names, *unreached):
            assert rank[name]["result"] == rank["torch"]["result"], name
        for name in ("torch", *unreached):
            assert rank[name]["paths"] == [], name
        for name in names:
            assert set(rank[name]["paths"]) == {harness.expected_path}, name
            assert rank[name]["batches"] > 0, name


def write_ways(
    program: Callable[[ways.Way], dict[str, Any]], rank: int, folder: str, names: Iterable[str]
) -> None:
    """What one rank does: writes down what `program` returned in each way. Its key "data" tells ranks apart."""
    results = {}
    for name in names:
        with ways.use(name) as way:
            result = program(way)
            results[name] = {"result": result, "paths": way.paths, "batches": way.batches}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


def main(program: Callable[[ways.Way], dict[str, Any]], rank: int) -> None:
    """What a script runs."""
    folder, *names = sys.argv[1:]
    write_ways(program, rank, folder, names)
