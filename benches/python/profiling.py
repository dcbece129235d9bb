"""The time of the main process and of a worker, by account: writes build/bench-profile.md. Needs perf.

Each sample's call chain tells on whose account it is: the function itself, or the nearest caller that is not
of the C library, and whether our code had called it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import BUILD
from .loaders import LOADERS, OURS
from .measure import process_cpu_ns
from .processes import ProcessFailedError, call_in_process
from .report import figure, head, machine
from .workloads import BY_NAME

WORKLOADS = ("tensor-1kb", "tensors-40x1kb", "images-uint8")
WARM_UP_SECONDS = 0.5
# More than 4 KB of a stack's top are seldom needed to find the caller.
RECORD = ["record", "-q", "-N", "-B", "-e", "cpu-clock", "-F", "997", "--call-graph", "dwarf,4096"]
FUNCTIONS = 3
MISSING = (
    "perf is not installed; it is in the package linux-perf (Debian), linux-tools-generic (Ubuntu) or perf "
    "(Fedora, Arch)"
)

SAMPLES = "the samples and their collation: torch and other libraries"
CONSUMER = "torch, called by the consumer: a batch is freed"
INTERPRETER = "CPython, running Python code"
OURS_BATCH = "ours: the batch as bytes (encoder, decoder, DLPack)"
OURS_COLLATION = "ours: native collation, with what it asks of torch and CPython"
OURS_TRANSPORT = "ours: rings, slots, scheduler, wake-ups"
TORCH_FOR_US = "torch, called by ours: makes and describes tensors"
PYTHON_FOR_US = "CPython, called by ours: makes and reads objects"
SLEEP = "kernel: going to sleep, waking others up"
FAULTS = "kernel: page faults"
KERNEL = "kernel: other"

_FRAME = re.compile(r"^\s+[0-9a-f]+ (.+) \(([^()]*)\)$")
_FAULT = re.compile(r"page_fault|handle_mm_fault")
_SLEEP = re.compile(r"schedule|futex|epoll|poll|eventfd|sys_read|sys_write|vfs_write|wake_up|task_switch")
# Files whose frames say nothing about the account.
_TRANSPARENT = re.compile(r"^(lib(c|m|gcc_s|stdc\+\+|pthread|dl)[.-]|ld-|\[vdso\]|\[unknown\])")
_TORCH = re.compile(r"^(libtorch|libc10|libgomp|libmkl|_C\.)")
_PYTHON = re.compile(r"^(libpython|python)")
_BATCH = re.compile(
    r"(::linux::(decode|encode|dlpack|grouping|identity|objects|torch)|ringloader_core::(batch|linux::transport::(delivery|message)))\b"
)
_COLLATION = re.compile(r"::linux::(collate|convert|original)\b")
_TRANSPORT = re.compile(r"(::linux::\w+|ringloader_core::\w+)")


@dataclass(frozen=True)
class Frame:
    """A function and the file that it is in."""

    function: str
    file: str

    @property
    def in_kernel(self) -> bool:
        """True if it runs on behalf of a system call or an interrupt."""
        return self.file.startswith(("[kernel", "[guest.kernel")) or self.file.endswith(".ko")

    @property
    def is_ours(self) -> bool:
        """True if it is in the extension module."""
        return self.file.startswith("_native")


def account(chain: list[Frame], in_worker: bool) -> str:
    """Returns on whose account a sample is.

    Args:
        chain: the function that ran, its caller, and so on.
        in_worker: whether it ran in a worker process.
    """
    if chain[0].in_kernel:
        kernel = " ".join(frame.function for frame in chain if frame.in_kernel)
        if _FAULT.search(kernel):
            return FAULTS
        return SLEEP if _SLEEP.search(kernel) else KERNEL
    if any(_COLLATION.search(frame.function) for frame in chain):
        return OURS_COLLATION
    frames = [frame for frame in chain if not _TRANSPARENT.match(frame.file)]
    if not frames:
        return INTERPRETER
    called_by_ours = False
    for frame in frames:
        if frame.is_ours:
            called_by_ours = True
            break
        if frame.function.startswith("_PyEval_EvalFrame"):
            break
    if frames[0].is_ours:
        return _part(frames)
    if _PYTHON.match(frames[0].file):
        return PYTHON_FOR_US if called_by_ours else INTERPRETER
    if _TORCH.match(frames[0].file) and called_by_ours:
        return TORCH_FOR_US
    return SAMPLES if in_worker else CONSUMER


def _part(frames: list[Frame]) -> str:
    """Returns the part of ours: what the nearest function with a name of ours is about."""
    for frame in frames:
        if _BATCH.search(frame.function):
            return OURS_BATCH
        if _TRANSPORT.search(frame.function):
            return OURS_TRANSPORT
    return OURS_TRANSPORT


def chains(perf: str, data: Path) -> Iterator[list[Frame]]:
    """The call chains that perf has recorded."""
    done = subprocess.run(
        [perf, "script", "--no-inline", "-F", "ip,sym,dso", "-i", data],
        check=True,
        capture_output=True,
        text=True,
    )
    chain: list[Frame] = []
    for line in [*done.stdout.splitlines(), ""]:
        found = _FRAME.match(line)
        if found:
            chain.append(Frame(found[1], found[2].rsplit("/", 1)[-1]))
        elif chain and not line.strip():
            yield chain
            chain = []


def recorded(workload_name: str, seconds: float) -> dict[str, Any]:
    """Runs our loader while perf watches; the accounts of the main process and of one worker.

    Raises:
        RuntimeError: perf could not record.
    """
    perf = shutil.which("perf")
    if perf is None:
        raise RuntimeError(MISSING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = BY_NAME[workload_name]
    arguments = workload.loader_arguments()
    loader = LOADERS[OURS]
    iterator = iter(loader.make(workload.dataset(), **arguments))
    batch = next(iterator)
    worker = min(process.pid for process in multiprocessing.active_children() if process.pid is not None)
    watched = {"main": os.getpid(), "worker": worker}
    with tempfile.TemporaryDirectory() as directory:
        files = {who: Path(directory) / who for who in watched}
        recording = str(2 * WARM_UP_SECONDS + seconds)
        watchers = [
            subprocess.Popen(
                [perf, *RECORD, "-o", files[who], "-p", str(pid), "--", "sleep", recording],
                stderr=subprocess.PIPE,
                text=True,
            )
            for who, pid in watched.items()
        ]
        begin = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < begin:
            batch = next(iterator)
        used = {who: -process_cpu_ns(pid) for who, pid in watched.items()}
        start = time.perf_counter()
        batches = 0
        while time.perf_counter() < start + seconds:
            batch = next(iterator)
            batches += 1
        elapsed = time.perf_counter() - start
        used = {who: used[who] + process_cpu_ns(pid) for who, pid in watched.items()}
        # The end of what is recorded must not be a pause.
        while any(watcher.poll() is None for watcher in watchers):
            batch = next(iterator)
        for watcher in watchers:
            assert watcher.stderr is not None
            said = watcher.stderr.read().strip()
            watcher.stderr.close()
            if watcher.returncode != 0:
                raise RuntimeError(f"perf could not record (kernel.perf_event_paranoid?): {said}")
        loader.checked(iterator)
        del batch, iterator
        made = {"main": batches, "worker": batches / arguments["num_workers"]}
        return {
            who: {
                "us_per_batch": elapsed / made[who] * 1e6,
                "cpu_us_per_batch": used[who] / made[who] / 1e3,
                "accounts": _accounts(perf, files[who], who == "worker"),
            }
            for who in watched
        }


def _accounts(perf: str, data: Path, in_worker: bool) -> dict[str, Counter[str]]:
    """For each account how many samples were in which function."""
    accounts: dict[str, Counter[str]] = {}
    for chain in chains(perf, data):
        accounts.setdefault(account(chain, in_worker), Counter())[_short(chain[0].function)] += 1
    if not accounts:
        raise RuntimeError("perf has seen nothing of the process")
    return accounts


def _short(function: str) -> str:
    """A name that fits into a table."""
    name = re.sub(r"^<(?:.*::)?(\w+).* as .*>::", r"\1::", function)
    name = re.sub(r"<.*>|\(.*", "", name).replace("|", "/") or function
    return name if len(name) <= 60 else f"...{name[-57:]}"


def table(who: str, measured: dict[str, Any]) -> str:
    """The accounts of one process, the largest first."""
    accounts: dict[str, Counter[str]] = measured["accounts"]
    total = sum(counts.total() for counts in accounts.values())
    cpu, wall = measured["cpu_us_per_batch"], measured["us_per_batch"]
    lines = [
        f"{who}: a batch every {figure(wall)} µs, for which it runs {figure(cpu)} µs ({total} samples).",
        "",
        "| what runs | share | µs per batch | most of it in |",
        "|---|--:|--:|---|",
    ]
    for name, counts in sorted(accounts.items(), key=lambda item: -item[1].total()):
        share = counts.total() / total
        functions = ", ".join(f"`{function}`" for function, _ in counts.most_common(FUNCTIONS))
        lines.append(f"| {name} | {share:.1%} | {figure(share * cpu)} | {functions} |")
    return "\n".join(lines) + "\n"


def _note() -> str:
    """Returns a note on what the tables cannot show here."""
    paranoid = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    if paranoid > 1 and os.geteuid() != 0:
        return (
            "\nThe kernel's share is not seen here, so the others' are too large: "
            f"kernel.perf_event_paranoid is {paranoid}, 1 would show it.\n"
        )
    return ""


def main() -> int:
    """Returns 1 if a workload could not be profiled."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.profiling", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each is watched (default 5)")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        help=f"workloads, separated by commas (default {','.join(WORKLOADS)})",
    )
    parser.add_argument("--out", type=Path, default=BUILD / "bench-profile.md")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in BY_NAME]
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    if shutil.which("perf") is None:
        print(MISSING, file=sys.stderr)
        return 1
    how = f"{OURS}, watched by perf for {options.seconds:g} s, 997 times a second of processor time"
    parts = [head(machine(), how) + "\n" + _note()]
    for name in options.only:
        workload = BY_NAME[name]
        print(f"{name}: {workload.text}", file=sys.stderr, flush=True)
        if workload.prepare is not None:
            workload.prepare()
        try:
            measured = call_in_process("forkserver", recorded, name, options.seconds)
        except ProcessFailedError as error:
            print(f"  {error}", file=sys.stderr)
            return 1
        parts.append(f"## {workload.text}\n")
        parts += [
            table(who, measured[key]) for who, key in (("Main process", "main"), ("A worker", "worker"))
        ]
    text = "\n".join(parts)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
