"""Workers that are stopped, hang or take their time."""

from __future__ import annotations

import os
import signal
import threading
import time

from chaos.case import Program, case, must
from chaos.data import Dies, Numbers, Slow, Stubborn, check, check_all
from faults.proc import is_running, wait_until


def _stopped(program: Program, workers: int) -> tuple[object, list[int]]:
    """An iterator all of whose workers are stopped."""
    loader = program.loader(Slow(10_000, 0.005), num_workers=workers, worker_init_fn=program.note)
    iterator = iter(loader)
    check(next(iterator), 0)
    pids = program.pids(workers)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return iterator, pids


def _all_gone(pids: list[int]) -> None:
    must(wait_until(lambda: not any(map(is_running, pids)), 3), "stopped workers are left")


@case(methods=("fork", "spawn"), limit=60, fast=True)
def del_with_stopped_workers(program: Program) -> None:
    """Two stopped workers: `del` returns within 3 s, and they are gone."""
    iterator, pids = _stopped(program, 2)
    with program.within(3, "del"):
        del iterator
    _all_gone(pids)


@case(limit=90)
def del_with_eight_stopped_workers(program: Program) -> None:
    """Eight stopped workers: `del` returns within 3 s, and they are gone."""
    iterator, pids = _stopped(program, 8)
    with program.within(3, "del"):
        del iterator
    _all_gone(pids)


@case(limit=40)
def exit_with_stopped_workers(program: Program) -> None:
    """The program ends though its workers are stopped."""
    program.kept = _stopped(program, 2)  # type: ignore[attr-defined]


@case(limit=40)
def parent_killed_with_stopped_workers(program: Program) -> None:
    """The program is ended by SIGTERM while its workers are stopped: they end too."""
    program.kept = _stopped(program, 2)  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.kill(os.getpid(), signal.SIGTERM)


@case()
def stopped_and_continued(program: Program) -> None:
    """A worker that is stopped for a second and continued loses nothing."""
    loader = program.loader(Numbers(300), num_workers=2, worker_init_fn=program.note)
    iterator = iter(loader)
    check(next(iterator), 0)
    pid = program.pids(2)[0]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1, os.kill, (pid, signal.SIGCONT)).start()
    with program.within(10):
        for number in range(1, 300):
            check(next(iterator), number)


@case(limit=60)
def timeout_of_a_stopped_worker(program: Program) -> None:
    """`timeout=2` and a worker that stops itself: an error after 2 s; the end takes no longer than 5 s."""
    loader = program.loader(Dies(20, 5, "stop"), num_workers=2, timeout=2)
    with program.within(9, "the error and the end"):
        try:
            check_all(loader, 20)
        except RuntimeError as error:
            must("timed out" in str(error), str(error))
        else:
            must(False, "no error")


@case(limit=60)
def timeout_of_a_hanging_dataset(program: Program) -> None:
    """`timeout=1` and a sample that takes forever: the error comes, and `del` ends its worker."""
    loader = program.loader(Slow(20, 1000, at=3), num_workers=2, timeout=1)
    iterator = iter(loader)
    with program.raises(RuntimeError, "timed out", seconds=5):
        for _ in range(20):
            next(iterator)
    del iterator


@case()
def timeout_names_the_sample(program: Program) -> None:
    """The error of `timeout` names the worker and the dataset indices."""
    loader = program.loader(Slow(20, 1000, at=5), batch_size=2, num_workers=2, timeout=1)
    with program.raises(RuntimeError, "timed out", r"\[4, 5\]", seconds=15):
        list(loader)


@case(limit=60)
def no_sigterm_ends_it(program: Program) -> None:
    """A sample that takes forever and ignores SIGTERM: `del` takes less than 12 s, and nothing is left."""
    loader = program.loader(Stubborn(20), num_workers=2, worker_init_fn=program.note)
    iterator = iter(loader)
    next(iterator)
    pids = program.pids(2)
    time.sleep(0.5)
    with program.within(12, "del"):
        del iterator
    _all_gone(pids)


@case(limit=60)
def del_while_a_sample_is_slow(program: Program) -> None:
    """A sample takes a minute: `del` takes less than 12 s, and nothing is left."""
    loader = program.loader(Slow(20, 60, at=3), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.5)
    with program.within(12, "del"):
        del iterator


@case(limit=60)
def four_slow_workers(program: Program) -> None:
    """All samples but one take a minute, in four workers: `del` takes less than 12 s."""
    loader = program.loader(Slow(8, 60), num_workers=4, worker_init_fn=program.note)
    iterator = iter(loader)
    program.pids(4)
    with program.within(12, "del"):
        del iterator


@case()
def parent_stopped_and_continued(program: Program) -> None:
    """The main process is stopped for 7 s: its workers are still there, and the epoch goes on."""
    loader = program.loader(Numbers(200), num_workers=2, timeout=20)
    iterator = iter(loader)
    check(next(iterator), 0)
    child = os.fork()
    if child == 0:
        time.sleep(7)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    for number in range(1, 200):
        check(next(iterator), number)
    os.waitpid(child, 0)
