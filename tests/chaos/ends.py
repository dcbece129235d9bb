"""Ends of iterations and programs: early, at exit, in finalizers, threads and forked children."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import pickle
import sys
import threading
import time
from typing import Any

import torch

from chaos.case import Program, case, must
from chaos.data import Numbers, Slow, Stream, check, check_all
from faults.proc import descendants, wait_until

FORKS_BESIDE_A_THREAD = (
    "as torch: a lock of glibc's that another thread has at the fork is never free in the worker"
)


@case(methods=("fork", "spawn"))
def del_in_mid_epoch(program: Program) -> None:
    """`del` in the middle takes less than 3 s, and the workers are gone."""
    loader = program.loader(Numbers(10**6), num_workers=2, worker_init_fn=program.note)
    iterator = iter(loader)
    next(iterator)
    program.pids(2)
    with program.within(3):
        del iterator


@case()
def exit_with_a_live_iterator(program: Program) -> None:
    """The program ends in the middle of an epoch: it ends in order."""
    program.kept = iter(program.loader(Numbers(1000), num_workers=2))  # type: ignore[attr-defined]
    next(program.kept)  # type: ignore[attr-defined]


@case(methods=("fork", "spawn", "forkserver"), tracebacks=0)
def exit_with_persistent_workers(program: Program) -> None:
    """The program ends with persistent workers and batches alive: silently."""
    loader = program.loader(Numbers(20), num_workers=2, persistent_workers=True)
    sys.kept = loader, list(loader)  # type: ignore[attr-defined]


@case(ends=3, tracebacks=0)
def sys_exit_in_the_loop(program: Program) -> None:
    """`sys.exit(3)` in the loop ends the program with 3, silently."""
    for _ in program.loader(Numbers(1000), num_workers=2):
        sys.exit(3)


@case(tracebacks=0, fast=True)
def end_in_a_finalizer(program: Program) -> None:
    """An iterator whose holder lives in a cycle ends with the collector, silently."""

    class Holder:
        def __del__(self) -> None:
            # The collector chooses which of the two is finalized first: the iterator may have ended.
            for batch in self.iterator:
                check(batch, 1)
                break

    for _ in range(3):
        holder = Holder()
        holder.iterator = iter(program.loader(Numbers(100), num_workers=2))  # type: ignore[attr-defined]
        holder.me = holder  # type: ignore[attr-defined]
        check(next(holder.iterator), 0)  # type: ignore[attr-defined]
        del holder
        gc.collect()
    must(wait_until(lambda: not descendants(), 5), "workers are left")


@case(tracebacks=0)
def iterates_in_atexit(program: Program) -> None:
    """A function at the program's exit goes on with an iterator: its batches come."""
    iterator = iter(program.loader(Numbers(30), num_workers=2))
    next(iterator)

    @atexit.register
    def rest() -> None:
        for number in range(1, 30):
            if int(next(iterator)[0, 0]) != number:
                os._exit(9)


@case()
def collector_at_every_moment(program: Program) -> None:
    """The cyclic collector runs at each allocation: 300 batches come, every byte right."""
    gc.set_threshold(1)
    check_all(program.loader(Numbers(300), num_workers=2), 300)


@case()
def forked_child_leaves_it_alone(program: Program) -> None:
    """The program forks in mid-epoch, and the child exits silently; the parent's epoch goes on."""
    iterator = iter(program.loader(Numbers(100), num_workers=2))
    check(next(iterator), 0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(writing, 2)
            del iterator
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    said = b""
    while part := os.read(reading, 4096):
        said += part
    must(os.waitpid(child, 0)[1] == 0, "the child failed")
    for number in range(1, 100):
        check(next(iterator), number)
    must(not said, f"the child printed: {said.decode()[-200:]}")


@case(limit=60)
def forked_child_asks_for_a_batch(program: Program) -> None:
    """A forked child asks its parent's iterator for a batch: an error there; the parent loses none."""
    iterator = iter(program.loader(Numbers(100), num_workers=2))
    check(next(iterator), 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(iterator)
        except (AssertionError, RuntimeError):
            code = 0
        finally:
            os._exit(code)
    with program.within(20):
        must(wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] != 0, 20), "the child waits for ever")
        for number in range(1, 100):
            check(next(iterator), number)


@case()
def forked_child_has_its_own_loader(program: Program) -> None:
    """A child that is forked in mid-epoch runs a loader of its own; the parent's epoch goes on."""
    iterator = iter(program.loader(Numbers(100), num_workers=2))
    check(next(iterator), 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_all(program.loader(Numbers(20), num_workers=2), 20)
            code = 0
        finally:
            os._exit(code)
    for number in range(1, 100):
        check(next(iterator), number)
    must(os.waitpid(child, 0)[1] == 0, "the child failed")


@case(known=("hang", FORKS_BESIDE_A_THREAD))
def in_a_thread(program: Program) -> None:
    """A thread starts and reads an epoch, while the main thread does the same."""
    failed: list[BaseException] = []

    def walk() -> None:
        try:
            for _ in range(3):
                check_all(program.loader(Numbers(100), num_workers=2), 100)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=walk)
    thread.start()
    for _ in range(3):
        check_all(program.loader(Numbers(100), num_workers=2), 100)
    thread.join()
    must(not failed, repr(failed))


@case(limit=60, known=("hang", FORKS_BESIDE_A_THREAD))
def in_eight_threads(program: Program) -> None:
    """Eight threads, each with a loader of two workers: each epoch is complete."""
    failed: list[BaseException] = []

    def walk() -> None:
        try:
            check_all(program.loader(Numbers(200), num_workers=2), 200)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=walk) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    must(not failed, repr(failed[:1]))


@case(limit=60)
def two_threads_share_an_iterator(program: Program) -> None:
    """Two threads call `next` of one iterator: each batch goes to one of them, and both end."""
    iterator = iter(program.loader(Numbers(2000, 10), num_workers=2))
    found: list[int] = []
    failed: list[BaseException] = []

    def walk() -> None:
        try:
            for batch in iterator:
                found.append(int(batch[0, 0]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=walk, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    must(not failed, f"an error: {failed[:1]!r}")
    must(sorted(found) == list(range(2000)), f"{len(found)} batches, {len(set(found))} different ones")
    must(not any(thread.is_alive() for thread in threads), "a thread waits for ever")


@case()
def exit_while_a_thread_iterates(program: Program) -> None:
    """The program ends while a daemon thread iterates: it ends in order."""

    def walk() -> None:
        for _ in program.loader(Numbers(10**7), num_workers=2):
            pass

    threading.Thread(target=walk, daemon=True).start()
    time.sleep(1)


class Nested(Numbers):
    """A sample reads a loader of its own."""

    def __init__(self, make: Any) -> None:
        super().__init__(6)
        self.make = make

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([batch.sum() for batch in self.make()])


@case()
def loader_in_a_worker(program: Program) -> None:
    """Each sample reads an epoch of a loader without workers: the samples are right."""
    inner = program.loader(Numbers(5, 10))
    for batch in program.loader(Nested(lambda: inner), num_workers=2):
        must(batch.tolist() == [[0, 10, 20, 30, 40]], f"{batch.tolist()}")


@case()
def validation_inside_of_training(program: Program) -> None:
    """An epoch of one loader within each step of another: both are right."""
    validation = program.loader(Numbers(10), num_workers=1, persistent_workers=True)
    for number, batch in enumerate(program.loader(Numbers(10), num_workers=2)):
        check(batch, number)
        check_all(validation, 10)


@case()
def empty_dataset(program: Program) -> None:
    """No sample, three epochs, persistent workers or not: no batch, and no wait."""
    for persistent in (False, True):
        loader = program.loader(
            Numbers(0),
            num_workers=2,
            persistent_workers=persistent,
            sampler=torch.utils.data.SequentialSampler([]),
        )
        with program.within(15):
            must([len(list(loader)) for _ in range(3)] == [0, 0, 0], "batches of nothing")


@case()
def more_workers_than_samples(program: Program) -> None:
    """One sample and eight workers: it comes, three times."""
    loader = program.loader(Numbers(1), num_workers=8, persistent_workers=True)
    for _ in range(3):
        check_all(loader, 1)


@case()
def empty_streams(program: Program) -> None:
    """Workers of an iterable dataset that gives nothing: no batch, and no wait."""
    loader = program.loader(Stream(0), num_workers=4, persistent_workers=True)
    with program.within(15):
        must([len(list(loader)) for _ in range(3)] == [0, 0, 0], "batches of nothing")


@case()
def copied_and_pickled_loader(program: Program) -> None:
    """A copy and a pickle of a loader in mid-epoch iterate on their own."""
    loader = program.loader(Numbers(30), num_workers=2)
    iterator = iter(loader)
    check(next(iterator), 0)
    check_all(copy.deepcopy(loader), 30)
    check_all(pickle.loads(pickle.dumps(program.loader(Numbers(30)))), 30)
    for number in range(1, 30):
        check(next(iterator), number)


@case()
def two_iterators_of_one_loader(program: Program) -> None:
    """Two iterators of one loader at once: each has all batches."""
    loader = program.loader(Numbers(100), num_workers=2)
    for number, (one, other) in enumerate(zip(loader, loader, strict=True)):
        check(one, number)
        check(other, number)


@case(ends=1, tracebacks=1)
def error_of_the_program(program: Program) -> None:
    """The loop's own error ends the program: one traceback, and nothing is left."""

    class Own(BaseException):
        pass

    for _ in program.loader(Numbers(1000), num_workers=2):
        raise Own("the program's")


@case()
def loader_in_a_process_of_multiprocessing(program: Program) -> None:
    """A process that the program starts runs a loader with workers and exits in order."""
    context = torch.multiprocessing.get_context("fork")
    process = context.Process(target=_in_a_process, args=(program,))
    process.start()
    process.join(20)
    must(process.exitcode == 0, f"exit code {process.exitcode}")


def _in_a_process(program: Program) -> None:
    check_all(program.loader(Numbers(50), num_workers=2), 50)
    program.kept = iter(program.loader(Numbers(50), num_workers=2))  # type: ignore[attr-defined]


@case()
def dropped_by_another_thread(program: Program) -> None:
    """An iterator is dropped by a thread that did not make it, while a slow sample is under way."""
    held = [iter(program.loader(Slow(1000, 0.2), num_workers=2))]
    next(held[0])
    thread = threading.Thread(target=held.clear)
    with program.within(8):
        thread.start()
        thread.join()
