"""Workers that are killed, crash or exit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import torch

from chaos.case import ALL_METHODS, WORKER_LOST, Program, case, must
from chaos.data import Dies, Numbers, Slow, check, check_all, die, identity
from faults.proc import is_running


def _while_it_fetches(program: Program, how: str) -> None:
    loader = program.loader(Dies(20, 5, how), num_workers=2)
    with program.raises(RuntimeError, WORKER_LOST, seconds=15):
        check_all(loader, 20)


@case(methods=ALL_METHODS)
def killed_while_it_fetches(program: Program) -> None:
    """The error names the worker."""
    _while_it_fetches(program, "kill")


@case(methods=("fork", "spawn"))
def segv_while_it_fetches(program: Program) -> None:
    """The error names the worker."""
    _while_it_fetches(program, "segv")


@case()
def abort_while_it_fetches(program: Program) -> None:
    """The error names the worker."""
    _while_it_fetches(program, "abort")


@case(methods=("fork", "spawn"))
def exit_0_while_it_fetches(program: Program) -> None:
    """The error names the worker."""
    _while_it_fetches(program, "exit0")


@case()
def exit_3_while_it_fetches(program: Program) -> None:
    """The error names the worker."""
    _while_it_fetches(program, "exit3")


@case(fast=True)
def error_names_the_samples(program: Program) -> None:
    """The error of a lost worker names the dataset indices that it was in."""
    loader = program.loader(Dies(40, 13, "kill"), batch_size=4, num_workers=2)
    with program.raises(RuntimeError, r"\b12\b.*\b13\b.*\b14\b.*\b15\b"):
        list(loader)


@case(methods=ALL_METHODS)
def idle_worker_killed(program: Program) -> None:
    """A worker that waits for a task is killed: an error, in seconds."""
    loader = program.loader(Numbers(1000), num_workers=2, prefetch_factor=1, worker_init_fn=program.note)
    iterator = iter(loader)
    check(next(iterator), 0)
    pid = program.pids(2)[0]
    time.sleep(0.3)
    with program.raises(RuntimeError, WORKER_LOST):
        os.kill(pid, signal.SIGKILL)
        for _ in range(1000):
            next(iterator)


@case()
def all_workers_killed(program: Program) -> None:
    """All workers are killed at once: an error, in seconds."""
    loader = program.loader(Slow(1000, 0.01), num_workers=4, worker_init_fn=program.note)
    iterator = iter(loader)
    next(iterator)
    pids = program.pids(4)
    with program.raises(RuntimeError, WORKER_LOST):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in range(1000):
            next(iterator)


def _sends_much(index: int) -> Any:
    return [bytes(20_000), torch.full((2000,), index), {"n": "x" * 50_000}]


class Pickled(Numbers):
    """Samples whose way to the main process takes long."""

    def __getitem__(self, index: int) -> Any:
        return _sends_much(index)


@case(limit=120)
def killed_while_they_send(program: Program) -> None:
    """Twelve times, a worker is killed at a random moment of sending: each time an error, within 15 s."""
    chance = random.Random(1)
    slowest = 0.0
    for _ in range(12):
        for path in program.folder.glob("worker.*"):
            path.unlink()
        loader = program.loader(
            Pickled(10**6), batch_size=None, num_workers=3, worker_init_fn=program.note, collate_fn=identity
        )
        iterator = iter(loader)
        next(iterator)
        victim = program.pids(3)[0]
        with program.raises(RuntimeError, WORKER_LOST, seconds=15):
            threading.Timer(chance.uniform(0.0, 0.1), os.kill, (victim, signal.SIGKILL)).start()
            while True:
                next(iterator)
        slowest = max(slowest, float(program.figure.split()[0]))
        del iterator, loader
    program.figure = f"{slowest:.2f} s at most"


@case(methods=ALL_METHODS, fast=True)
def lost_worker_is_replaced(program: Program) -> None:
    """With `restart_workers`, each batch comes once, in order, every byte right."""
    loader = program.loader(Dies(60, 7, "kill", program.folder), num_workers=2, ours={"restart_workers": 2})
    with program.within(30):
        check_all(loader, 60)


@case()
def eight_workers_killed_and_replaced(program: Program) -> None:
    """Random kills of 8 workers with `restart_workers`: 3,000 batches, each once, in order."""
    loader = program.loader(
        Numbers(3000, 500), num_workers=8, worker_init_fn=program.note, ours={"restart_workers": 10**6}
    )
    stop, kills = threading.Event(), 0
    chance = random.Random(2)

    def kill() -> None:
        nonlocal kills
        while not stop.wait(0.02):
            pid = chance.choice(program.pids()[-8:])
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
                kills += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        count = 0
        for count, batch in enumerate(loader, 1):
            check(batch, count - 1)
            time.sleep(0.0003)
        must(count == 3000, f"{count} batches")
    finally:
        stop.set()
        killer.join()
    must(kills > 5, f"only {kills} kills")
    program.figure = f"{kills} kills"


@case()
def held_batches_outlive_the_worker(program: Program) -> None:
    """Batches of a killed worker keep their bytes."""
    loader = program.loader(Dies(40, 20, "kill", elements=100_000), num_workers=2)
    held = []
    with program.raises(RuntimeError, WORKER_LOST):
        for batch in loader:
            held.append(batch)
    for number, batch in enumerate(held):
        check(batch, number)
    must(len(held) >= 10, f"only {len(held)} batches came")


@case(methods=("fork", "spawn"))
def persistent_worker_killed_between_epochs(program: Program) -> None:
    """The next epoch raises, and does not wait forever."""
    loader = program.loader(Numbers(20), num_workers=2, persistent_workers=True, worker_init_fn=program.note)
    check_all(loader, 20)
    # Torch's handler of SIGCHLD may tell it before the next epoch.
    with program.raises(RuntimeError, WORKER_LOST):
        os.kill(program.pids(2)[0], signal.SIGKILL)
        time.sleep(0.2)
        list(loader)


@case()
def a_loader_after_a_death(program: Program) -> None:
    """A loader iterates again after a death, with new workers."""
    loader = program.loader(Dies(20, 5, "kill", program.folder), num_workers=2)
    with program.raises(RuntimeError, WORKER_LOST):
        list(loader)
    check_all(loader, 20)


def _exits(_worker: int) -> None:
    os._exit(0)


@case()
def exits_in_worker_init_fn(program: Program) -> None:
    """A worker that exits with 0 before its first task: an error, in seconds."""
    loader = program.loader(Numbers(20), num_workers=2, worker_init_fn=_exits)
    with program.raises(RuntimeError, WORKER_LOST):
        list(loader)


def _collate_and_die(samples: list[Any]) -> Any:
    die("kill")
    return samples


@case()
def killed_in_collate(program: Program) -> None:
    """The error names the worker."""
    loader = program.loader(Numbers(20), num_workers=2, collate_fn=_collate_and_die)
    with program.raises(RuntimeError, WORKER_LOST):
        list(loader)


@case()
def killed_with_a_timeout(program: Program) -> None:
    """A worker is killed where `timeout=30`: its error comes long before."""
    loader = program.loader(Dies(20, 5, "kill"), num_workers=2, timeout=30)
    with program.raises(RuntimeError, WORKER_LOST, seconds=15):
        list(loader)


@case()
def out_of_order_death(program: Program) -> None:
    """With `in_order=False` the death of a worker is told too, while the other goes on."""
    loader = program.loader(Dies(10**6, 5, "kill"), num_workers=2, in_order=False)
    with program.raises(RuntimeError, WORKER_LOST):
        for _ in loader:
            pass


class Threaded(Numbers):
    """A thread of the worker ends it, while the worker works."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            threading.Timer(0.1, die, ("kill",)).start()
        time.sleep(0.01)
        return super().__getitem__(index)


@case()
def a_thread_of_the_worker_kills_it(program: Program) -> None:
    """The error names the worker."""
    loader = program.loader(Threaded(10_000), num_workers=2)
    with program.raises(RuntimeError, WORKER_LOST):
        list(loader)


@case()
def other_loader_goes_on(program: Program) -> None:
    """A death in one loader ends no other loader's iteration."""
    other = iter(program.loader(Numbers(50), num_workers=2))
    check(next(other), 0)
    with program.raises(RuntimeError, WORKER_LOST):
        list(program.loader(Dies(20, 5, "kill"), num_workers=2))
    for number in range(1, 50):
        check(next(other), number)


class Forks(Numbers):
    """Each worker leaves a child behind that holds all that it inherited."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            die("kill")
        return super().__getitem__(index)


@case(grace=12)
def killed_with_a_child_of_its_own(program: Program) -> None:
    """A worker forks and is killed, and its child lives on with its pipes: an error, in seconds."""
    loader = program.loader(Forks(20), num_workers=2)
    with program.raises(RuntimeError, WORKER_LOST, seconds=7):
        list(loader)
