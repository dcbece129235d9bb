"""Loaders that are changed, copied, subclassed, used in threads and in children."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler

from parity.datasets import Order, Samples, SizedStream, Stream, identity, init_draws
from parity.side_by_side import assert_same


def _collate(samples: list[Any]) -> Any:
    return {"many": len(samples), "first": samples[0]}


CHANGES: dict[str, Any] = {
    "batch_size": 5,
    "drop_last": True,
    "dataset": Samples(3),
    "sampler": [1, 2],
    "batch_sampler": [[1], [2]],
    "persistent_workers": True,
    "collate_fn": _collate,
    "num_workers": 3,
    "prefetch_factor": 1,
    "timeout": 20,
    "worker_init_fn": init_draws,
    "generator": torch.Generator().manual_seed(4),
    "pin_memory": True,
    "in_order": True,
    "multiprocessing_context": "fork",
    "anything": 3,
}


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_of_the_loader_is_changed_between_epochs(loader_class, name, persistent):
    """Torch refuses some, and reads the others at the next iterator."""

    def scenario(kind, told):
        loader = kind(Samples(7), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent)
        told.iterate(loader)
        value = CHANGES[name]
        value = value.clone_state() if isinstance(value, torch.Generator) else value
        told.step("set", lambda: setattr(loader, name, value))
        told.iterate(loader)
        told.step("len", lambda: len(loader))

    assert_same(scenario, loader_class)


def test_batch_sampler_is_replaced_past_the_guard(loader_class):
    """Ultralytics does this."""

    def scenario(kind, told):
        loader = kind(Samples(7), batch_size=2, num_workers=1)
        object.__setattr__(loader, "batch_sampler", Order([[0, 1], [5]]))
        told.iterate(loader)
        told.step("log", lambda: loader.batch_sampler.log)

    assert_same(scenario, loader_class)


def test_an_endless_sampler(loader_class):
    """timm does this: the iterator is asked for a part of an epoch, again and again."""

    class Repeated:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            while True:
                yield from iter(self.sampler)

    def scenario(kind, told):
        loader = kind(Samples(5), batch_size=2, shuffle=True, num_workers=2)
        object.__setattr__(loader, "batch_sampler", Repeated(loader.batch_sampler))
        iterator = told.step("iter", lambda: iter(loader))
        for _ in range(3):
            told.drain(iterator, 3)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_the_iterator_counts(loader_class, persistent):
    def scenario(kind, told):
        loader = kind(Samples(9), batch_size=2, num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            iterator = iter(loader)
            told.step("len", lambda iterator=iterator: len(iterator))
            for _ in range(5):
                names = ("_num_yielded", "_send_idx", "_rcvd_idx", "_tasks_outstanding", "_workers_status")
                told.step("next", lambda iterator=iterator: next(iterator))
                # Time decides which results have arrived.
                told.step(
                    "counts",
                    lambda iterator=iterator, n=names: [getattr(iterator, x) for x in n if x != n[3]],
                )
            told.drain(iterator)

    assert_same(scenario, loader_class)


def test_next_after_the_end(loader_class):
    def scenario(kind, told):
        for persistent in (False, True):
            loader = kind(Samples(3), num_workers=2, persistent_workers=persistent)
            iterator = told.iterate(loader)
            told.drain(iterator)
            told.drain(iterator)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("dataset", [Samples(6), Stream((3, 2))], ids=["map", "stream"])
def test_an_iterator_that_was_shut_down(loader_class, dataset):
    """With several workers it depends on time whether torch has the next batch already."""

    def scenario(kind, told):
        loader = kind(dataset, num_workers=1)
        iterator = told.iterate(loader, 2)
        for _ in range(2):
            told.step("shut down", iterator._shutdown_workers)
        told.step("del", iterator.__del__)
        told.step("next", lambda: next(iterator))
        told.step("del", iterator.__del__)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_a_loader_is_copied(loader_class, how, persistent):
    """With a living iterator of persistent workers torch refuses what goes through pickle."""
    copied = {
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
    }[how]

    def scenario(kind, told):
        generator = torch.Generator().manual_seed(4)
        loader = kind(
            Samples(5), shuffle=True, num_workers=2, persistent_workers=persistent, generator=generator
        )
        told.iterate(copied(loader))
        told.iterate(loader)
        # The error names the iterator's class.
        other = told.step("copy", lambda: copied(loader), text=False)
        if other is not None:
            told.iterate(other)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy])
def test_an_iterator_cannot_be_pickled(loader_class, how):
    def scenario(kind, told):
        iterator = told.iterate(kind(Samples(5), num_workers=1), 1)
        told.step("copy", lambda: how(iterator), text=False)
        told.drain(iterator)

    steps = assert_same(scenario, loader_class)
    assert ("error", "NotImplementedError") in [step[1] for step in steps]


def _own_get_iterator(kind):
    class Own(kind):
        def _get_iterator(self):
            self.asked = getattr(self, "asked", 0) + 1
            return super()._get_iterator()

    return Own


def _own_iter(kind):
    class Own(kind):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                yield {"number": number, "batch": batch}

    return Own


def _own_index_sampler(kind):
    class Own(kind):
        @property
        def _index_sampler(self):
            return [[3, 1], [0]]

    return Own


def _own_auto_collation(kind):
    class Own(kind):
        @property
        def _auto_collation(self):
            return False

    return Own


def _own_init(kind):
    class Own(kind):
        def __init__(self, dataset, extra, **kwargs):
            self.extra = extra
            super().__init__(dataset, collate_fn=identity, **kwargs)

    return lambda dataset, **kwargs: Own(dataset, 3, **kwargs)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "own", [_own_get_iterator, _own_iter, _own_index_sampler, _own_auto_collation, _own_init]
)
def test_subclasses(loader_class, own, persistent):
    def scenario(kind, told):
        loader = own(kind)(
            Samples(7), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent
        )
        for _ in range(2):
            told.step("epoch", lambda: list(loader))
        told.step("asked", lambda: getattr(loader, "asked", None))

    assert_same(scenario, loader_class)


class _SlowLen(torch.utils.data.Dataset):
    """A dataset whose length takes time, in which other threads run."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        time.sleep(0.002)
        return self._length

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}],
    ids=["in order", "shuffle", "generator"],
)
@pytest.mark.parametrize("length", [40, 1 << 16], ids=["one draw", "word by word"])
def test_threads_share_an_iterator_without_workers(loader_class, arguments, length):
    """Each batch comes once. A sampler that Python reads refuses a second thread, which then asks again."""
    torch.manual_seed(3)
    iterator = iter(loader_class(_SlowLen(length), batch_size=length // 20, **arguments))
    batches, errors = [], []
    begin = threading.Barrier(3)

    def take():
        begin.wait()
        while not errors:
            try:
                batches.append(next(iterator).tolist())
            except StopIteration:
                return
            except ValueError as error:
                if str(error) != "generator already executing":
                    errors.append(error)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(begin.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(index for batch in batches for index in batch) == list(range(length))


def test_loaders_in_threads(loader_class):
    """Each thread has a loader and a generator of its own; one gets an iterator that was made elsewhere."""

    def scenario(kind, told):
        found: dict[int, Any] = {}

        # Two threads that fork at once may wait for each other, in libraries that torch loads.
        starting = threading.Lock()

        def walk(number, iterator):
            with starting:
                iterator = iterator or iter(loaders[number])
            found[number] = [batch["index"].tolist() + batch["torch"].tolist() for batch in iterator]

        loaders = [
            kind(
                Samples(12),
                batch_size=2,
                shuffle=True,
                num_workers=1,
                generator=torch.Generator().manual_seed(number),
            )
            for number in range(3)
        ]
        made_here = iter(loaders[2])
        threads = [
            threading.Thread(target=walk, args=(number, made_here if number == 2 else None))
            for number in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told.step("found", lambda: [found[number] for number in range(3)])

    assert_same(scenario, loader_class)


class LoadsInside(Dataset):
    """A sample is what another loader gives, made in the worker."""

    def __init__(self, kind, workers):
        self.kind = kind
        self.workers = workers

    def __len__(self):
        return 2

    def __getitem__(self, index):
        try:
            return list(self.kind(Samples(3), num_workers=self.workers))
        except AssertionError as error:
            return [str(error)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_inside_a_worker(loader_class, workers):
    """Daemons may have no children: torch's workers are daemons, and so are ours."""

    def scenario(kind, told):
        told.iterate(kind(LoadsInside(kind, workers), batch_size=None, num_workers=1))

    steps = assert_same(scenario, loader_class)
    assert ("daemonic processes" in str(steps)) == (workers == 1)


def _in_process(kind, results):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    loader = kind(Samples(5), shuffle=True, num_workers=2, batch_size=2)
    results.put([batch["index"].tolist() for batch in loader])


def test_a_loader_in_a_forked_process(loader_class):
    context = multiprocessing.get_context("fork")

    def scenario(kind, told):
        alive = iter(kind(Samples(9), num_workers=1))
        next(alive)
        results = context.SimpleQueue()
        process = context.Process(target=_in_process, args=(kind, results))
        process.start()
        told.step("found", results.get)
        process.join()
        told.step("exit code", lambda: process.exitcode)
        told.drain(alive)

    steps = assert_same(scenario, loader_class)
    assert "0" in str(steps[1][1])


def test_streams_are_warned_about_in_every_epoch(loader_class):
    def scenario(kind, told):
        loader = kind(SizedStream((3, 3), declared=2), num_workers=2, persistent_workers=True)
        for _ in range(2):
            told.step("len", lambda: len(loader))
            told.iterate(loader)

    steps = assert_same(scenario, loader_class)
    assert sum("was reported to be" in str(step[2]) for step in steps) == 8


def test_len_is_asked_after_iter(loader_class):
    """Then no warning comes in this epoch, as the length was not asked for when it began."""

    def scenario(kind, told):
        loader = kind(SizedStream((3, 3), declared=2), num_workers=2)
        iterator = told.iterate(loader, 1)
        told.step("len", lambda: len(loader))
        told.drain(iterator)

    assert_same(scenario, loader_class)


def test_the_sampler_changes_while_it_is_read(loader_class):
    """torch reads a sampler's length when its generator begins."""

    class Grows(Samples):
        pass

    def scenario(kind, told):
        dataset = Grows(4)
        loader = kind(dataset, sampler=SequentialSampler(dataset), num_workers=1, prefetch_factor=1)
        told.iterate(loader)
        dataset.length = 6
        iterator = told.iterate(loader, 2)
        dataset.length = 8
        told.drain(iterator)

    assert_same(scenario, loader_class)


def test_the_event_in_a_profile(loader_class):
    def scenario(kind, told):
        with torch.autograd.profiler.profile() as profile:
            list(kind(Samples(3), num_workers=1))
        names = {event.name for event in profile.function_events if "DataLoader" in event.name}
        told.step("names", lambda: sorted(names))

    steps = assert_same(scenario, loader_class)
    assert "_MultiProcessingDataLoaderIter.__next__" in str(steps)
