"""The long ones: what a process has does not grow, however often it is done. Prints the series."""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.case import Program, must
from chaos.data import Numbers, Raises, check
from faults.proc import descendants, descriptors, is_running, mappings, wait_until


@dataclass(frozen=True)
class Held:
    """The resources of the process at one moment. Memory is in KiB: its own, and its part of the shared."""

    memory: int
    descriptors: int
    threads: int
    processes: int
    mappings: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        memory = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        threads = len(list(Path("/proc/self/task").iterdir()))
        return Held(memory, len(descriptors()), threads, len(descendants()), len(mappings()))


# Memory in KiB and mappings that an allocator may have more of at one moment than at another.
SLACK = Held(memory=12 << 10, descriptors=0, threads=0, processes=0, mappings=40)


class Series:
    def __init__(self, shown: bool = False, running: int = 0) -> None:
        self.taken: list[tuple[int, Held]] = []
        self.shown = shown
        self.running = running

    def take(self, count: int) -> None:
        wait_until(lambda: len(descendants()) <= self.running, 5)
        held = Held.now()
        self.taken.append((count, held))
        if self.shown:
            print(  # noqa: T201
                f"{count:>9}  {held.memory / 1024:8.1f} MiB  {held.descriptors:4} descriptors  "
                f"{held.threads:3} threads  {held.processes:3} processes  {held.mappings:5} mappings",
                flush=True,
            )

    def must_be_flat(self) -> None:
        """The median of the last third is no more than the most of the first, but for what malloc has."""
        third = max(1, len(self.taken) // 3)
        for name in Held.__dataclass_fields__:
            first = max(getattr(held, name) for _, held in self.taken[:third])
            last = statistics.median(getattr(held, name) for _, held in self.taken[-third:])
            must(last <= first + getattr(SLACK, name), f"{name} grew from {first} to {last}: {self.taken}")


def abandoned(program: Program) -> Iterator[int]:
    loader = program.loader(Numbers(1000, 20_000), num_workers=2)
    while True:
        iterator = iter(loader)
        check(next(iterator), 0)
        del iterator
        yield 1


def loaders(program: Program) -> Iterator[int]:
    while True:
        yield sum(1 for _ in program.loader(Numbers(8, 20_000), num_workers=2))


def epochs(program: Program) -> Iterator[int]:
    loader = program.loader(Numbers(8, 20_000), num_workers=2)
    while True:
        yield sum(1 for _ in loader)


def persistent(program: Program) -> Iterator[int]:
    """The workers live from one epoch to the next."""
    loader = program.loader(Numbers(50, 20_000), num_workers=2, persistent_workers=True)
    while True:
        for number, batch in enumerate(loader):
            check(batch, number)
        # The batch would live as long as this generator is suspended.
        del batch
        yield 50


def errors(program: Program) -> Iterator[int]:
    loader = program.loader(Raises(20, 5, ValueError), num_workers=2)
    while True:
        try:
            list(loader)
        except ValueError:
            yield 5


def restarts(program: Program) -> Iterator[int]:
    """One worker after the other is killed, in one epoch."""
    loader = program.loader(
        Numbers(10**8, 500), num_workers=2, worker_init_fn=program.note, ours={"restart_workers": 10**9}
    )
    number = 0
    iterator = iter(loader)
    while True:
        alive: list[int] = []
        while len(alive) < 2:
            check(next(iterator), number)
            number += 1
            alive = [pid for pid in program.pids() if is_running(pid)]
        victim = alive[number % 2]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda pid=victim: not is_running(pid), 5)  # type: ignore[misc]
        (program.folder / f"worker.{victim}").unlink()
        while not [pid for pid in program.pids(1) if pid not in alive]:
            check(next(iterator), number)
            number += 1
        yield 1


def batches(program: Program) -> Iterator[int]:
    """Ten thousand batches of one epoch at a time, some of them held."""
    iterator = iter(program.loader(Numbers(10**9, 200), num_workers=2))
    number = 0
    while True:
        held = []
        for _ in range(10_000):
            batch = next(iterator)
            check(batch, number)
            held = [*held[-7:], batch]
            number += 1
        held.clear()
        del batch
        yield 10_000


def storm(program: Program) -> Iterator[int]:
    """8 workers, one of them killed every 50 ms or so; each batch once, in order, every byte checked."""
    import threading

    chance = random.Random(3)
    loader = program.loader(
        Numbers(10**9, 64), num_workers=8, prefetch_factor=4, worker_init_fn=program.note,
        ours={"restart_workers": 10**9},
    )  # fmt: skip
    stop = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while not stop.wait(chance.uniform(0.01, 0.1)):
            for path in list(program.folder.glob("worker.*")):
                if not is_running(int(path.suffix[1:])):
                    path.unlink(missing_ok=True)
            alive = [int(path.suffix[1:]) for path in program.folder.glob("worker.*")]
            if alive:
                try:
                    os.kill(chance.choice(alive), signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass

    killer = threading.Thread(target=kill, daemon=True)
    iterator = iter(loader)
    killer.start()
    number = 0
    try:
        while True:
            for _ in range(1000):
                check(next(iterator), number)
                number += 1
            yield 1000
    finally:
        stop.set()
        killer.join()
        print(f"{kills} kills, {number} batches, each once, in order, every byte right")  # noqa: T201


Kind = Callable[[Program], Iterator[int]]
KINDS: dict[str, Kind] = {
    made.__name__: made for made in (abandoned, loaders, epochs, persistent, errors, restarts, batches, storm)
}
# Kinds whose workers live while the series is taken.
RUNNING = {"persistent": 2, "restarts": 2, "batches": 2, "storm": 8}


def run(name: str, program: Program, seconds: float, count: int | None) -> None:
    """Does it for the time, or as often as stated; takes twenty moments of it behind a warm-up."""
    print(f"{name}:", flush=True)  # noqa: T201
    series = Series(shown=True, running=RUNNING.get(name, 0))
    made = KINDS[name](program)
    began = time.monotonic()
    done, batches_done = 0, 0
    due = 0.1
    while True:
        part = done / count if count else (time.monotonic() - began) / seconds
        if part >= due and done:
            series.take(done)
            due = part + 0.045
        if part >= 1:
            break
        batches_done += next(made)
        done += 1
    took = time.monotonic() - began
    series.take(done)
    made.close()  # type: ignore[attr-defined]
    series.must_be_flat()
    print(f"{name}: {done} times, {batches_done} batches, {took:.0f} s: flat\n", flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="none: all")
    parser.add_argument("--minutes", type=float, default=8, help="for all kinds together")
    parser.add_argument("--count", type=int, help="how often each is done, in place of a time")
    parser.add_argument("--loader", choices=("ringloader", "torch"), default="ringloader")
    options = parser.parse_args()
    names = options.kinds or list(KINDS)
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="soak.") as folder:
            program = Program(options.loader == "ringloader", "fork", Path(folder))
            # Each restart of a worker is logged, and the log is not looked at.
            import logging

            logging.getLogger("ringloader").setLevel(logging.ERROR)
            try:
                run(name, program, options.minutes * 60 / len(names), options.count)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}\n", flush=True)  # noqa: T201
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
