"""Trains the same small network twice, through torch's DataLoader and through ringloader's, and compares.

ringloader's run decodes each crop once, by CachedDataset. Each run has a process of its own, so neither
warms up the other; the two take turns, an epoch each, so that a busy machine slows both. Exits non-zero if a
loss differs in any bit or ringloader used torch's loader.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
from photographs import DIRECTORY, PHOTOGRAPHS, ROOT, prepare
from training import NUM_WORKERS, Epoch, serve

LOADER_BOUND = ["tensor-1kb", "tensors-40x1kb", "collated-10mb"]


def train(directory: Path, epochs: int, kinds: list[str]) -> dict[str, list[Epoch]]:
    """Trains once per kind of loader, taking turns."""
    context = multiprocessing.get_context("spawn")
    start_method = multiprocessing.get_start_method()
    connections = {}
    processes = []
    for kind in kinds:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, kind, directory, start_method)))
        processes[-1].start()
        theirs.close()
        connections[kind] = ours
    runs: dict[str, list[Epoch]] = {kind: [] for kind in kinds}
    try:
        for connection in connections.values():
            connection.recv()
        for number in range(epochs):
            # The order alternates, so that neither always follows the other.
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                connections[kind].send(f"{kind}, epoch {number + 1} of {epochs}")
                runs[kind].append(connections[kind].recv())
            print(report.epoch_line(number, {kind: runs[kind][-1] for kind in kinds}), flush=True)
    except (EOFError, ConnectionError):
        raise SystemExit("a training process ended early; its traceback is above") from None
    finally:
        for connection in connections.values():
            connection.close()
        for process in processes:
            process.join(20)
    return runs


def loader_bound(rounds: int) -> list[dict[str, Any]]:
    """Rows of the benchmark in which nothing but the loader works."""
    out = DIRECTORY / "loader-bound"
    command = [sys.executable, "-m", "benches.python", "--only", ",".join(LOADER_BOUND)]
    command += ["--loaders", "torch,ringloader"]
    command += ["--rounds", str(rounds), "--seconds", "0.7", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the benchmark of loader-bound batches failed; see {out.with_suffix('.md')}")
    rows: list[dict[str, Any]] = json.loads(out.with_suffix(".json").read_text())["rows"]
    return rows


def verdict_of_loader_bound() -> str:
    """Returns ringloader's verdict on the first of these rows."""
    import ringloader

    sys.path.insert(0, str(ROOT))
    from benches.python.workloads import WORKLOADS

    workload = next(one for one in WORKLOADS if one.name == LOADER_BOUND[0])
    with ringloader.DataLoader(workload.dataset(), **workload.loader_arguments(), stats=True) as loader:
        for _ in itertools.islice(loader, 20_000):
            pass
        return loader.epoch_stats().verdict.text


def problems(runs: dict[str, list[Epoch]]) -> list[str]:
    """What must not be; empty when all is well."""
    found = []
    for number, (theirs, ours) in enumerate(zip(runs["torch"], runs["ringloader"], strict=True), start=1):
        if theirs.loss.hex() != ours.loss.hex():
            found.append(
                f"epoch {number}: loss {theirs.loss.hex()} with torch, {ours.loss.hex()} with ringloader"
            )
        if theirs.weights != ours.weights:
            found.append(f"epoch {number}: the weights differ")
        if ours.path != "native":
            found.append(f"epoch {number}: ringloader took the path {ours.path}: {ours.reason}")
        if theirs.path != "torch":
            found.append(f"epoch {number}: torch's side ran on {theirs.path}, so nothing was compared")
    return found


def main() -> int:
    """Returns 1 if the runs differ or were not what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each run (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the loader-bound rows (default 3)")
    options = parser.parse_args()
    started = time.perf_counter()
    directory = prepare()
    print(f"{len(PHOTOGRAPHS)} photographs: {', '.join(PHOTOGRAPHS)}")
    print(
        f"{NUM_WORKERS} workers, one thread for the network; two processes take turns, an epoch each",
        flush=True,
    )
    runs = train(directory, options.epochs, ["torch", "ringloader"])
    print()
    print(report.training_table(runs))
    found = problems(runs)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    print(f"Every loss and every weight is equal to the last bit over {options.epochs} epochs.")
    print(f"ringloader's path: {runs['ringloader'][-1].path} ({runs['ringloader'][-1].reason})\n", flush=True)
    print("Batches that only the loader works on:", flush=True)
    rows = loader_bound(options.rounds)
    print(report.loader_table(rows))
    print(f"What limits the training: {runs['ringloader'][-1].verdict}")
    print(f"What limits {LOADER_BOUND[0]}: {verdict_of_loader_bound()}\n")
    plot = report.plot(runs, rows, DIRECTORY / "report.png")
    print(f"plot: {plot.relative_to(ROOT)}; {time.perf_counter() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
