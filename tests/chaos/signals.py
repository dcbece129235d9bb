"""Signals to the program: its end by any means, Ctrl-C, SIGTERM, and signals of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from chaos.case import ALL_METHODS, Program, case, must
from chaos.data import Numbers, Slow, check, check_all


def _running(program: Program, dataset: Any = None, **options: Any) -> Any:
    """An iterator whose workers have all begun."""
    loader = program.loader(
        dataset or Numbers(10**6, 50_000), num_workers=2, worker_init_fn=program.note, **options
    )
    iterator = iter(loader)
    next(iterator)
    program.pids(2)
    return iterator


@case(methods=ALL_METHODS, ends=-signal.SIGKILL, grace=1.5, fast=True)
def parent_sigkill(program: Program) -> None:
    """The program is killed: all its workers are gone within 1.5 s."""
    kept = _running(program)  # noqa: F841
    os.kill(os.getpid(), signal.SIGKILL)


@case(methods=("fork", "spawn"), ends=-signal.SIGKILL, grace=1.5)
def parent_sigkill_in_slow_samples(program: Program) -> None:
    """The program is killed while each worker sleeps in a sample: they are gone within 1.5 s."""
    loader = program.loader(Slow(10, 30), num_workers=2, worker_init_fn=program.note)
    kept = iter(loader)  # noqa: F841
    program.pids(2)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


@case(ends=-signal.SIGKILL, grace=1.5)
def parent_sigkill_with_held_batches(program: Program) -> None:
    """The program is killed with 200 batches in hand: no process and no name in /dev/shm is left."""
    iterator = _running(program)
    kept = [next(iterator) for _ in range(200)]  # noqa: F841
    os.kill(os.getpid(), signal.SIGKILL)


@case(ends=-signal.SIGKILL, grace=1.5)
def parent_sigkill_between_epochs(program: Program) -> None:
    """The program is killed while persistent workers are idle: they are gone within 1.5 s."""
    loader = program.loader(Numbers(10), num_workers=2, persistent_workers=True, worker_init_fn=program.note)
    check_all(loader, 10)
    os.kill(os.getpid(), signal.SIGKILL)


@case(ends=-signal.SIGSEGV, grace=1.5)
def parent_segv(program: Program) -> None:
    """The program crashes: all its workers are gone within 1.5 s."""
    kept = _running(program)  # noqa: F841
    os.kill(os.getpid(), signal.SIGSEGV)


@case(ends=5, grace=1.5)
def parent_os_exit(program: Program) -> None:
    """The program leaves by `os._exit`: all its workers are gone within 1.5 s."""
    kept = _running(program)  # noqa: F841
    os._exit(5)


@case(ends=-signal.SIGTERM, grace=1.5)
def parent_sigterm(program: Program) -> None:
    """SIGTERM ends the program, and all its workers within 1.5 s."""
    kept = _running(program)  # noqa: F841
    os.kill(os.getpid(), signal.SIGTERM)


@case(ends=-signal.SIGHUP, grace=1.5)
def parent_sighup(program: Program) -> None:
    """SIGHUP, as when the terminal goes, ends the program, and all its workers within 1.5 s."""
    kept = _running(program)  # noqa: F841
    os.killpg(0, signal.SIGHUP)


@case()
def sigterm_handler_exits(program: Program) -> None:
    """A handler of SIGTERM that calls `sys.exit` while a batch is awaited ends the program within 3 s."""
    iterator = _running(program, Slow(10**6, 0.2))

    def leave(*_: Any) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with program.within(3.5):
            for _ in iterator:
                pass
    except SystemExit:
        del iterator


def _interrupted(program: Program, dataset: Any, after: float) -> None:
    loader = program.loader(dataset, num_workers=2)
    threading.Timer(after, os.killpg, (0, signal.SIGINT)).start()
    began = time.monotonic()
    try:
        for _ in loader:
            pass
        must(False, "the interrupt did not come")
    except KeyboardInterrupt:
        took = time.monotonic() - began - after
        program.figure = f"{took:.2f} s"
        must(took < 2.5, f"the interrupt took {took:.1f} s")
    check_all(program.loader(Numbers(20), num_workers=2), 20)


@case(fast=True)
def ctrl_c_while_waiting(program: Program) -> None:
    """Ctrl-C to the whole group while a batch is awaited: KeyboardInterrupt, and a loader works then."""
    _interrupted(program, Slow(10**6, 0.3), 1.0)


@case()
def ctrl_c_in_a_fast_loop(program: Program) -> None:
    """Ctrl-C to the whole group in a loop that never waits: as above."""
    _interrupted(program, Numbers(10**7, 10), 1.0)


@case(limit=80)
def ctrl_c_at_the_start(program: Program) -> None:
    """Ctrl-C to this process at 20 moments of a start: KeyboardInterrupt, the next one works."""
    for count in range(20):
        loader = program.loader(Numbers(30), num_workers=2)
        timer = threading.Timer(count * 0.003, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            check_all(loader, 30)
            time.sleep(0.3)
        except KeyboardInterrupt:
            pass
        timer.join()
        check_all(loader, 30)


@case(ends=-signal.SIGINT, tracebacks=1, grace=2)
def ctrl_c_uncaught(program: Program) -> None:
    """Ctrl-C to the whole group that nobody catches: one traceback, and the end within 2 s."""
    loader = program.loader(Slow(10**6, 0.1), num_workers=2)
    threading.Timer(1, os.killpg, (0, signal.SIGINT)).start()
    for _ in loader:
        pass


@case()
def alarms_all_the_time(program: Program) -> None:
    """A handler runs every millisecond: each batch still comes once, every byte right."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    check_all(program.loader(Numbers(2000), num_workers=2), 2000)
    signal.setitimer(signal.ITIMER_REAL, 0)


@case()
def handler_that_raises(program: Program) -> None:
    """A handler raises in the wait for a batch, ten times: it comes to the caller, and no batch is lost."""

    class Alarm(Exception):  # noqa: N818
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    iterator = iter(program.loader(Slow(30, 0.05), num_workers=2))
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.07)
    numbers, alarms = [], 0
    while True:
        try:
            numbers.append(int(next(iterator)[0, 0]))
        except Alarm:
            alarms += 1
            if alarms == 10:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except StopIteration:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    must(numbers == list(range(30)), f"batches {numbers} after {alarms} errors of the handler")
    must(alarms > 1, "the handler did not run")


@case()
def sigchld_ignored(program: Program) -> None:
    """A program that ignores SIGCHLD: two epochs come, and the end is in order."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    loader = program.loader(Numbers(50), num_workers=2)
    with program.within(15):
        check_all(loader, 50)
        check_all(loader, 50)


@case()
def children_reaped_by_the_program(program: Program) -> None:
    """A thread of the program waits for any child, workers too: two epochs come, and the end is in order."""

    def reap() -> None:
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.01)

    threading.Thread(target=reap, daemon=True).start()
    loader = program.loader(Numbers(50), num_workers=2)
    with program.within(15):
        check_all(loader, 50)
        check_all(loader, 50)


class Alarmed(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            signal.signal(signal.SIGALRM, self.late)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(5)
        return super().__getitem__(index)

    @staticmethod
    def late(*_: Any) -> None:
        raise TimeoutError("the sample took too long")


@case()
def alarm_in_a_worker(program: Program) -> None:
    """A worker's own alarm raises in its sample: that error arrives."""
    with program.raises(TimeoutError, "took too long"):
        list(program.loader(Alarmed(20), num_workers=2))


@case()
def signals_to_waiting_workers(program: Program) -> None:
    """Workers with a handler of SIGUSR1 get it a thousand times: nothing is lost."""
    note = program.note

    def begin(worker: int) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        note(worker)

    loader = program.loader(Numbers(2000), num_workers=2, worker_init_fn=begin)
    iterator = iter(loader)
    check(next(iterator), 0)
    pids = program.pids(2)
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.0005)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for number in range(1, 1900):
            check(next(iterator), number)
    finally:
        stop.set()
        sender.join()
