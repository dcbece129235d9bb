"""Two ranks under torchrun, each of which runs one program in every way."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ringloader
from faults import proc
from frameworks import loader_ways

RANKS = 2
_TESTS = Path(__file__).resolve().parent.parent
_PACKAGE = str(Path(ringloader.__file__).resolve().parent.parent)


def run_ranks(
    script: str, folder: Path, names: tuple[str, ...] = loader_ways.OURS, seconds: float = 150
) -> None:
    """Runs `frameworks/<script>` on two ranks; asserts that each way gave every rank what torch's gave it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    logs = f"--log-dir={folder / 'logs'}"
    run_program([*torchrun, logs, f"frameworks/{script}", str(folder), "torch", *names], seconds)
    check_ways(folder, names)


def run_program(arguments: list[str], seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Runs Python where it and its workers find what they import, and returns its output.

    Asserts that it succeeds.
    """
    path = os.pathsep.join(filter(None, (str(_TESTS), _PACKAGE, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=_TESTS,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"the program hangs\n{out}") from None
    assert process.returncode == 0, out
    return out


def check_ways(folder: Path, names: tuple[str, ...], unreached: tuple[str, ...] = ()) -> None:
    """Asserts that each way gave every rank what torch's gave it, and that `names` came to us.

    The ways in `unreached` must not: they are documented so.
    """
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert ranks[0]["torch"]["result"]["data"] != ranks[1]["torch"]["result"]["data"], "ranks share data"
    for rank in ranks:
        torchs = rank["torch"]
        assert torchs["torchs"] > 0
        for name in (*names, *unreached):
            assert rank[name]["result"] == torchs["result"], name
        for name in ("torch", *unreached):
            assert rank[name]["paths"] == [], name
        for name in names:
            assert rank[name]["paths"] == ["native"] * torchs["torchs"], name
            assert rank[name]["batches"] > 0, name


def write_ways(
    program: Callable[[loader_ways.Way], dict[str, Any]], rank: int, folder: str, names: Iterable[str]
) -> None:
    """Runs one rank: writes down what `program` returned in each way. "data" in it tells ranks apart."""
    results = {}
    for name in names:
        with loader_ways.use(name) as way:
            result = program(way)
            results[name] = {
                "result": result,
                "paths": way.paths,
                "batches": way.batches,
                "torchs": way.torchs,
            }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


def main(program: Callable[[loader_ways.Way], dict[str, Any]], rank: int) -> None:
    """Runs one rank, in a script."""
    folder, *names = sys.argv[1:]
    write_ways(program, rank, folder, names)
    gc.collect()
    left = proc.wait_without_children(20)
    assert not left, f"worker processes outlive their loaders: {left}"
