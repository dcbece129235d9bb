"""``seeding=``: the same random numbers for any workers, by the formula of the documents."""

import gc
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import ringloader
from ringloader import ArrayDataset, DataLoader, Dispatch, StatefulDataLoader, WorkerPool
from ringloader._torch import select_path
from ringloader._worker.gather import Rows

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

N = 23
SEED = 1234


def key_of(seed, epoch, rank, worker, place):
    """The formula of docs/seeds.md."""
    key = 0
    for part in (seed, epoch, rank, worker, place):
        z = (key + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        key = z ^ (z >> 31)
    return key


def drawn(draws=1):
    """Draws from the generators that a dataset may use here: from python's, torch's, numpy's."""
    info = get_worker_info()
    if getattr(info, "worker_method", None) == "thread":
        rng = info.rng
        return [
            (
                rng.random_generator.random(),
                torch.rand(1, generator=rng.torch_generator).item(),
                rng.numpy_generator.random(),
            )
            for _ in range(draws)
        ]
    return [(random.random(), torch.rand(1).item(), np.random.random()) for _ in range(draws)]


def expected(key, draws=1, is_thread=False):
    python, torchs = random.Random(key), torch.Generator().manual_seed(key)
    numpys = np.random.default_rng(key) if is_thread else np.random.RandomState(key >> 32)
    return [(python.random(), torch.rand(1, generator=torchs).item(), numpys.random()) for _ in range(draws)]


class Drawing(Dataset):
    """Gives each index with numbers that are drawn for it."""

    def __init__(self, length=N):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, *drawn()[0]


class Stream(IterableDataset):
    """Each worker's own samples, with numbers that are drawn for them."""

    def __init__(self, length=7):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        for number in range(self.length):
            yield (0 if info is None else info.id), number, *drawn()[0]


def made(dataset=None, cls=DataLoader, **options):
    options = {"collate_fn": list, "batch_size": 4, "seeding": "sample", "seed": SEED, **options}
    return cls(Drawing() if dataset is None else dataset, **options)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def samples(order, epoch=0, rank=0, places=None, is_thread=False):
    """The samples of an epoch with this order."""
    places = range(len(order)) if places is None else places
    return [
        (index, *expected(key_of(SEED, epoch, rank, 0, place), is_thread=is_thread)[0])
        for place, index in zip(places, order, strict=True)
    ]


WAYS = {
    "none": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "three": {"num_workers": 3},
    "prefetch": {"num_workers": 2, "prefetch_factor": 5},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "decoded": {"num_workers": 2, "main_prefetch": 2},
    "watched": {"num_workers": 2, "watchdog": 100.0},
    "skipping": {"num_workers": 2, "on_error": "skip"},
    "restarting": {"num_workers": 2, "restart_workers": 1},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "three threads": {"num_workers": 3, "worker_method": "thread", "on_error": "skip", "watchdog": 100.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_has_the_numbers_of_its_place(way):
    order = list(range(N))
    loader = made(**WAYS[way])
    for epoch in range(2):
        assert flat(loader) == samples(order, epoch, is_thread="thread" in way)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 1, 7, 100])
def test_the_size_of_batches_makes_no_difference(size, workers):
    options = {"batch_size": size, "num_workers": workers}
    if size is None:
        options["collate_fn"] = None
    got = list(made(**options)) if size is None else flat(made(**options))
    assert [tuple(sample) for sample in got] == samples(range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_is_that_of_the_order_and_not_the_index(workers):
    """Also where an index comes again, and where Python iterates the sampler."""
    for sampler in (
        RandomSampler(range(N), replacement=True, num_samples=30, generator=torch.Generator().manual_seed(3)),
        list(reversed(range(N))),
    ):
        state = sampler.generator.get_state() if isinstance(sampler, RandomSampler) else None
        got = flat(made(sampler=sampler, num_workers=workers))
        if state is not None:
            sampler.generator.set_state(state)
        assert got == samples(list(sampler))


@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_order(workers):
    got = flat(made(num_workers=workers, in_order=False))
    assert sorted(got) == samples(range(N))


BATCHES = {
    "pickled": lambda: [["a", "b"], ["c"], ["d", "e", "f"]],
    "tuples": lambda: [(0, 1), (2,), (3, 4, 5)],
    "arrays": lambda: [np.array([0, 1]), np.array([2]), np.array([3, 4, 5])],
    "once": lambda: (iter(batch) for batch in ([0, 1], [2], [3, 4, 5])),
    "empty": lambda: [[0, 1], [], [2], [], [3, 4, 5]],
}


class Once:
    """A batch sampler whose batches come from a function."""

    def __init__(self, name):
        self.name = name

    def __iter__(self):
        return iter(BATCHES[self.name]())


@pytest.mark.parametrize("way", ["none", "two", "threads"])
@pytest.mark.parametrize("name", BATCHES)
def test_any_batch_sampler(name, way):
    loader = DataLoader(
        Drawing(), batch_sampler=Once(name), collate_fn=list, seeding="sample", seed=SEED, **WAYS[way]
    )
    order = flat(BATCHES[name]())
    got = list(loader)
    sizes = [len(list(batch)) for batch in BATCHES[name]()]
    places = [(number << 32) + at for number, size in enumerate(sizes) for at in range(size)]
    assert flat(got) == samples(order, places=places, is_thread=way == "threads")
    assert [len(batch) for batch in got] == sizes


class Following:
    """A ``collate_fn`` that draws."""

    def __call__(self, batch):
        return batch, drawn(2)


def key_of_batch(place):
    """The key of the batch whose first sample has this place."""
    z = (key_of(SEED, 0, 0, 0, place) + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("way", ["none", "two", "threads"])
@pytest.mark.parametrize("seeding", ["sample", "batch"])
def test_collation_has_the_key_of_its_batch(seeding, way):
    is_thread = way == "threads"
    loader = DataLoader(
        Drawing(6),
        batch_sampler=Once("empty"),
        seeding=seeding,
        seed=SEED,
        collate_fn=Following(),
        **WAYS[way],
    )
    at = 0
    for number, (batch, drawn_behind) in enumerate(loader):
        indices = list(range(at, at + len(batch)))
        places = [(number << 32) + place for place in range(len(batch))]
        if seeding == "sample":
            assert batch == (samples(indices, places=places, is_thread=is_thread) if batch else [])
            assert drawn_behind == expected(key_of_batch(number << 32), 2, is_thread)
        else:
            key = key_of(SEED, 0, 0, 0, number << 32)
            numbers = expected(key, len(batch) + 2, is_thread)
            assert [sample[1:] for sample in batch] == numbers[: len(batch)]
            assert drawn_behind == numbers[len(batch) :]
        at += len(batch)
    assert at == 6


@pytest.mark.parametrize("way", ["none", "two", "three", "threads", "skipping"])
def test_before_each_batch(way):
    got = list(made(seeding="batch", **WAYS[way]))
    assert [len(batch) for batch in got] == [4] * 5 + [3]
    for number, batch in enumerate(got):
        key = key_of(SEED, 0, 0, 0, 4 * number)
        assert [sample[1:] for sample in batch] == expected(key, len(batch), way == "threads")


class Several(Drawing):
    def __getitems__(self, indices):
        assert type(indices) is list
        return [self[index] for index in indices]


@pytest.mark.parametrize("way", ["none", "two", "threads", "skipping"])
def test_getitems_draws_for_its_batch(way):
    for number, batch in enumerate(made(Several(), **WAYS[way])):
        key = key_of(SEED, 0, 0, 0, 4 * number)
        assert [sample[1:] for sample in batch] == expected(key, len(batch), way == "threads")


class OwnSubset(Subset):
    """Torch asks its ``__getitems__``, and not ``__getitem__``."""

    def __getitem__(self, index):
        return "not asked"

    def __getitems__(self, indices):
        return [self.dataset[self.indices[index]] for index in indices]


@pytest.mark.parametrize("way", ["none", "two", "threads", "skipping"])
def test_torchs_wrappers_ask_for_one_sample_after_another(way):
    order = list(range(N - 1, 2, -2))
    is_thread = way == "threads"
    expected_samples = samples(order, is_thread=is_thread)
    assert flat(made(Subset(Drawing(), order), **WAYS[way])) == expected_samples
    assert flat(made(Subset(Subset(Drawing(), range(N)), order), **WAYS[way])) == expected_samples
    stacked = flat(made(StackDataset(a=Drawing(), b=Drawing()), **WAYS[way]))
    for place, sample in enumerate(stacked):
        both = expected(key_of(SEED, 0, 0, 0, place), 2, is_thread)
        assert sample == {"a": (place, *both[0]), "b": (place, *both[1])}
    # A dataset with a `__getitems__` of its own in them, and a subclass, are asked as by torch.
    for dataset in (Subset(Several(), order), OwnSubset(Drawing(), order)):
        for number, batch in enumerate(made(dataset, **WAYS[way])):
            key = key_of(SEED, 0, 0, 0, 4 * number)
            assert [sample[0] for sample in batch] == order[4 * number :][:4]
            assert [sample[1:] for sample in batch] == expected(key, len(batch), is_thread)


@pytest.mark.parametrize("seeding", ["sample", "batch"])
@pytest.mark.parametrize("way", ["none", "two", "persistent", "threads", "skipping"])
def test_workers_of_an_iterable_dataset_count_their_samples(way, seeding):
    loader = made(Stream(), seeding=seeding, **WAYS[way])
    workers = WAYS[way].get("num_workers", 1)
    for epoch in range(2):
        found = {worker: [] for worker in range(workers)}
        for batch in loader:
            found[batch[0][0]].append(batch)
        for worker, batches in found.items():
            assert [len(batch) for batch in batches] == [4, 3]
            for number, sample in enumerate(flat(batches)):
                place = number if seeding == "sample" else number // 4 * 4
                key = key_of(SEED, epoch, 0, worker, place)
                assert sample[:2] == (worker, number)
                assert sample[2:] == expected(key, number - place + 1, way == "threads")[number - place]


def with_numbers(item):
    return item, *drawn()[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_of_a_dispatch(workers):
    """They run where the samples are made."""
    loader = made(Dispatch(range(8)).map(with_numbers), num_workers=workers)
    for epoch in range(2):
        for item, *numbers in flat(loader):
            worker, place = (item % workers, item // workers) if workers else (0, item)
            assert numbers == list(expected(key_of(SEED, epoch, 0, worker, place))[0])


class Draws:
    """An ``__iter__`` that is no generator, whose iterator has a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at == 3:
            raise ValueError("a bad sample")
        if self.at > 6:
            raise StopIteration
        return self.at, *drawn()[0]


class DrawsStream(IterableDataset):
    def __iter__(self):
        return Draws()


@pytest.mark.parametrize("way", ["none", "one", "threads"])
def test_a_sample_of_a_stream_that_is_skipped_has_its_place(way):
    options = {**WAYS[way], "num_workers": min(1, WAYS[way].get("num_workers", 0))}
    got = flat(made(DrawsStream(), on_error="skip", **options))
    assert got == [
        (at, *expected(key_of(SEED, 0, 0, 0, at - 1), is_thread=way == "threads")[0])
        for at in (1, 2, 4, 5, 6)
    ]


class Failing(Drawing):
    """One index raises the first times, having drawn."""

    def __init__(self, bad, times):
        super().__init__()
        self.bad = bad
        self.times = times

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if index == self.bad and self.times:
            self.times -= 1
            raise ValueError("a bad sample")
        return found


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("way", ["none", "one", "threads"])
def test_a_sample_that_raises_leaves_the_others_as_they_are(way, size):
    options = {**WAYS[way], "batch_size": size, "collate_fn": None if size is None else list}
    options["num_workers"] = min(1, options.get("num_workers", 0))
    whole = samples(range(N), is_thread=way == "threads")

    def got(bad, **on_error):
        found = list(made(bad, **options, **on_error))
        return [tuple(sample) for sample in (found if size is None else flat(found))]

    assert got(Failing(6, 99), on_error="skip") == whole[:6] + whole[7:]
    # Asked for again, it is the sample that it would have been.
    assert got(Failing(6, 2), on_error=ringloader.Retry(2, backoff=0)) == whole
    replaced = got(Failing(6, 99), on_error=lambda index, _error: (index, "another"))
    assert replaced == [*whole[:6], (6, "another"), *whole[7:]]


class DiesOnce(Drawing):
    """A worker ends at some indices, at the first visit."""

    def __init__(self, marks, bad=(5, 13)):
        super().__init__()
        self.marks = Path(marks)
        self.bad = bad

    def __getitem__(self, index):
        mark = self.marks / str(index)
        if index in self.bad and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [1, 4])
def test_a_worker_that_is_started_again_sets_the_same_seeds(tmp_path, size, caplog):
    with caplog.at_level(logging.WARNING, "ringloader"):
        got = flat(made(DiesOnce(tmp_path), num_workers=2, restart_workers=2, batch_size=size))
    assert got == samples(range(N))
    text = "\n".join(caplog.messages)
    assert len(list(tmp_path.iterdir())) == 2 and "dataset indices [" in text and "Placed" not in text


def test_the_error_of_a_lost_worker_names_the_index(tmp_path):
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        flat(made(DiesOnce(tmp_path), num_workers=2, batch_size=2))
    assert [note for note in caught.value.__notes__ if note.startswith("it was in")] == [
        "it was in batch 2 of the epoch: dataset indices [4, 5]"
    ]


class Slow(Drawing):
    def __getitem__(self, index):
        if index == 5:
            time.sleep(0.6)
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("way", ["two", "threads"])
def test_what_is_said_of_a_late_batch_names_the_index(way, in_order, caplog):
    with caplog.at_level(logging.WARNING, "ringloader"):
        loader = made(Slow(), batch_size=2, watchdog=0.2, in_order=in_order, **WAYS[way])
        assert len(flat(loader)) == N
    text = "\n".join(caplog.messages)
    assert "dataset indices [4, 5]" in text and "Placed" not in text


@pytest.mark.parametrize("way", ["none", "two", "persistent", "threads"])
def test_which_epoch_it_is(way):
    """Epochs are counted, or named by ``set_epoch``, as for ``Seeds``."""
    is_thread = way == "threads"
    loader = made(**WAYS[way])
    assert flat(loader) == samples(range(N), 0, is_thread=is_thread)
    next(iter(loader))
    assert flat(loader) == samples(range(N), 2, is_thread=is_thread)
    loader.set_epoch(7)
    assert flat(loader) == samples(range(N), 7, is_thread=is_thread)
    assert flat(loader) == samples(range(N), 8, is_thread=is_thread)


def note(_dataset, _info, seeds):
    return [(seeds.epoch, *one) for one in [(0,), (1,)]]


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
def test_each_epoch_is_counted_once(way):
    """``worker_reset_fn`` has the epochs of seeding."""
    loader = made([0, 1], worker_reset_fn=note, batch_size=None, collate_fn=None, **WAYS[way])
    assert [[epoch for epoch, _ in loader] for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


class WithEpoch(list):
    """A sampler that counts epochs in its own way."""

    epoch = 40

    def set_epoch(self, epoch):
        self.epoch = 10 * epoch


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
def test_the_epoch_of_a_sampler_that_has_one(way):
    sampler = WithEpoch(range(N))
    loader = made(sampler=sampler, **WAYS[way])
    assert flat(loader) == samples(range(N), 40)
    assert flat(loader) == samples(range(N), 40)
    loader.set_epoch(3)
    assert flat(loader) == samples(range(N), 30)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_ranks_are_those_of_one(workers, drop_last):
    def rank(number, ranks, **options):
        sampler = DistributedSampler(Drawing(24), ranks, number, seed=5, drop_last=drop_last)
        sampler.set_epoch(3)
        return flat(made(Drawing(24), sampler=sampler, num_workers=workers, **options))

    whole = rank(0, 1)
    assert whole == samples([sample[0] for sample in whole], epoch=3)
    for ranks in (2, 3):
        for size in (1, 4):
            parts = [rank(number, ranks, batch_size=size) for number in range(ranks)]
            assert [sample for together in zip(*parts, strict=True) for sample in together] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_other_samplers_have_keys_for_each_rank(workers, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert flat(made(num_workers=workers)) == samples(range(N), rank=1)
    got = flat(made(Stream(5), num_workers=workers, batch_size=5))[:5]
    assert [sample[2:] for sample in got] == [expected(key_of(SEED, 0, 1, 0, place))[0] for place in range(5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_it_is_torchs_base_seed(workers):
    def got(generator=None):
        iterator = iter(made(seed=None, num_workers=workers, generator=generator))
        return iterator._base_seed, flat(iterator)

    torch.manual_seed(8)
    base_seed, found = got()
    assert found == [(index, *expected(key_of(base_seed, 0, 0, 0, index))[0]) for index in range(N)]
    torch.manual_seed(8)
    assert got() == (base_seed, found)
    assert (
        got(torch.Generator().manual_seed(2)) == got(torch.Generator().manual_seed(2)) != (base_seed, found)
    )


def program_state():
    return random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())


def seed_program():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    # The second number of a pair waits in a generator.
    random.gauss(0, 1), np.random.randn(), torch.randn(1)


@pytest.mark.parametrize("seeding", ["sample", "batch"])
@pytest.mark.parametrize("dataset", [Drawing(), Several(), Stream()], ids=["one", "several", "iterable"])
def test_without_workers_the_programs_generators_are_put_back(dataset, seeding):
    """The draws of the order stay."""
    seed_program()
    shuffle = not isinstance(dataset, IterableDataset)

    class Silent(Drawing):
        def __getitem__(self, index):
            return index

    torchs = torch.utils.data.DataLoader(Silent(), batch_size=4, shuffle=shuffle)
    if shuffle:
        order = torch.cat(list(torchs)).tolist()
    else:
        iter(torchs)
    after = program_state()

    seed_program()
    loader = made(dataset, shuffle=shuffle or None, seeding=seeding)
    iterator = iter(loader)
    first = next(iterator)
    between = program_state()
    rest = list(iterator)
    assert program_state() == between == after
    if shuffle:
        assert [sample[0] for sample in flat([first, *rest])] == order


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_they_are_put_back_when_a_sample_raises(error):
    class Bad(Drawing):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            if index == 5:
                raise error("a bad sample")
            return found

    iterator = iter(made(Bad()))
    next(iterator)
    seed_program()
    before = program_state()
    with pytest.raises(error, match="a bad sample"):
        next(iterator)
    assert program_state() == before
    assert next(iterator) == samples(range(8, 12), places=range(8, 12)), "as torch's, it goes on"


@pytest.mark.parametrize("way", ["two", "threads"])
def test_workers_leave_the_programs_generators_alone(way):
    loader = made(**WAYS[way])
    iterator = iter(loader)
    before = program_state()
    flat(iterator)
    assert program_state() == before


class Nested(Drawing):
    """Has a loader of its own, which seeds too, in a worker."""

    def __getitem__(self, index):
        before = drawn()
        # Else its iterator draws a seed from the worker's generator.
        inner = flat(made(Drawing(3), batch_size=2, seed=index, generator=torch.Generator()))
        return before + drawn(), inner


@pytest.mark.parametrize("way", ["none", "two", "threads"])
def test_a_loader_in_a_dataset_puts_the_workers_back(way):
    for index, (numbers, inner) in enumerate(flat(made(Nested(5), **WAYS[way]))):
        is_thread = way == "threads"
        assert numbers == expected(key_of(SEED, 0, 0, 0, index), 2, is_thread)
        assert inner == [
            (place, *expected(key_of(index, 0, 0, 0, place), is_thread=is_thread)[0]) for place in range(3)
        ]


ARRAYS = {
    "tensors": lambda: TensorDataset(torch.arange(N)),
    "arrays": lambda: ArrayDataset(np.arange(N), label=torch.arange(N)),
    "bare": lambda: np.arange(N),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_still_gathered(name, workers, monkeypatch):
    if name == "tensors" and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("torch gathers tensors here")
    torchs = []
    monkeypatch.setattr(Rows, "note_torchs", lambda _: torchs.append(1))
    plain = list(DataLoader(ARRAYS[name](), batch_size=4, num_workers=workers))
    got = list(made(ARRAYS[name](), num_workers=workers, collate_fn=None))
    assert repr(got) == repr(plain) and not torchs


@pytest.mark.parametrize("way", ["none", "two", "threads"])
def test_a_collation_of_arrays_has_the_key_of_its_batch(way):
    for number, (_, behind) in enumerate(made(ARRAYS["bare"](), collate_fn=Following(), **WAYS[way])):
        assert behind == expected(key_of_batch(4 * number), 2, way == "threads")


class DrawingColumn:
    """A column of an ``ArrayDataset`` that draws."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return drawn()[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_column_that_draws_has_the_numbers_of_its_place(workers):
    got = flat(made(ArrayDataset(np.arange(N), DrawingColumn()), num_workers=workers))
    assert [numbers for _, numbers in got] == [sample[1:] for sample in samples(range(N))]


class ByWorker(Dataset):
    """Worker 0 takes its time. Each sample says who made it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        worker = get_worker_info().id
        if worker == 0:
            time.sleep(0.02)
        return index, worker


def slowly(loader):
    """Takes the batches one by one, so that a worker that is quick answers meanwhile."""
    for batch in loader:
        time.sleep(0.002)
        yield from batch


class WithState(ByWorker):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("way", ["two", "threads", "persistent"])
def test_tasks_go_to_the_worker_with_the_fewest(way, in_order):
    loader = made(ByWorker(), batch_size=1, in_order=in_order, **WAYS[way])
    for _ in range(2):
        got = list(slowly(loader))
        assert sorted(index for index, _ in got) == list(range(40))
        if in_order:
            assert got == sorted(got)
        assert sum(worker == 0 for _, worker in got) < 16


@pytest.mark.parametrize("way", ["two", "threads"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [(ByWorker(), {"seeding": "torch", "seed": None}), (WithState(), {"cls": StatefulDataLoader})],
)
def test_else_torchs_turns_stay(dataset, options, way):
    got = flat(made(dataset, batch_size=1, **WAYS[way], **options))
    assert got == [(index, index % 2) for index in range(40)]


def test_one_worker_may_have_all_tasks():
    """More than its part, and large ones, while the other is at its first."""

    class Large(ByWorker):
        def __getitem__(self, index):
            if get_worker_info().id == 0:
                time.sleep(0.05)
            return torch.full((50_000,), index), get_worker_info().id

    loader = made(Large(), batch_size=1, num_workers=2, prefetch_factor=4, max_shared_bytes=4 << 20)
    got = list(slowly(loader))
    assert [int(tensor[7]) for tensor, _ in got] == list(range(40))
    assert sum(worker == 0 for _, worker in got) < 20


@pytest.mark.parametrize("way", ["none", "two", "threads"])
@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize(
    "later", [{}, {"num_workers": 2}, {"batch_size": 7}, {"num_workers": 2, "batch_size": 3}]
)
def test_a_resumed_epoch_goes_on_with_the_places_of_its_samples(way, seed, later):
    later = {"worker_method": "thread", "num_workers": 2, **later} if way == "threads" else later

    def loader(**options):
        generator = torch.Generator().manual_seed(6)
        return made(cls=StatefulDataLoader, seed=seed, shuffle=True, generator=generator, **options)

    whole = loader(**WAYS[way])
    torch.manual_seed(4)
    epochs = [flat(whole) for _ in range(3)]
    torch.manual_seed(4)
    stopped = loader(**WAYS[way])
    assert flat(stopped) == epochs[0]
    iterator = iter(stopped)
    got = flat(itertools.islice(iterator, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = loader(**later)
    resumed.load_state_dict(state)
    assert got + flat(resumed) == epochs[1]
    assert flat(resumed) == epochs[2]


@pytest.mark.parametrize("batches", [1, 6, None])
def test_a_state_that_other_code_has_edited_or_at_the_end(batches):
    whole = made()
    epochs = [flat(whole) for _ in range(2)]
    loader = made(cls=StatefulDataLoader)
    iterator = iter(loader)
    list(iterator) if batches is None else list(itertools.islice(iterator, batches))
    state = loader.state_dict()
    if batches == 1:
        state["_num_yielded"] = batches = 4
    resumed = made(cls=StatefulDataLoader, num_workers=2)
    resumed.load_state_dict(state)
    rest = flat(resumed)
    assert rest == (epochs[1] if batches is None else epochs[0][4 * batches :])
    if batches is not None:
        assert flat(resumed) == epochs[1]


def test_a_resumed_epoch_of_ranks():
    def loader(epoch, **options):
        sampler = DistributedSampler(Drawing(), 2, 1, seed=5)
        sampler.set_epoch(epoch)
        return made(cls=StatefulDataLoader, sampler=sampler, **options)

    whole = flat(loader(3))
    stopped = loader(3)
    iterator = iter(stopped)
    got = next(iterator)
    resumed = loader(0, num_workers=2)
    resumed.load_state_dict(stopped.state_dict())
    resumed.sampler.set_epoch(9)
    assert got + flat(resumed) == whole


@pytest.mark.parametrize("kind", ["install", "convert", "pool"])
def test_other_ways_to_a_loader(kind):
    options = {"seeding": "sample", "seed": SEED}
    plain = torch.utils.data.DataLoader(Drawing(), 4, collate_fn=list, num_workers=2)
    if kind == "install":
        with ringloader.installed(**options):
            assert flat(plain) == samples(range(N))
    elif kind == "convert":
        loader = ringloader.convert(plain, **options)
        assert loader.seeding == "sample" and flat(loader) == samples(range(N))
    else:
        with WorkerPool(2) as pool:
            for _ in range(2):
                assert flat(made(worker_pool=pool)) == samples(range(N))


@pytest.mark.parametrize("taken_by", ["class", "install", "convert"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seeding": 1}, TypeError, "seeding must be one of .*'sample'.*, not 1"),
        ({"seeding": "epoch"}, ValueError, "seeding must be one of .*'batch'.*, not 'epoch'"),
        (
            {"seeding": "batch", "reseed_workers": True},
            ValueError,
            "seeding='batch' and reseed_workers=True do not go together: .*leave reseed_workers out",
        ),
        ({"seed": 5}, ValueError, "seed=5 has no effect without .*seeding"),
        ({"seed": 5, "seeding": "torch"}, ValueError, "seed=5 has no effect without"),
    ],
)
def test_what_is_wrong_is_said_at_once(options, error, text, taken_by):
    with pytest.raises(error, match=text):
        if taken_by == "class":
            DataLoader(Drawing(), **options)
        elif taken_by == "install":
            ringloader.install(**options)
        else:
            ringloader.convert(torch.utils.data.DataLoader(Drawing()), **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeding", ["sample", "batch"])
def test_on_torchs_own_path_it_is_an_error(seeding, workers, monkeypatch):
    reason = select_path.Reason("the test wants it")
    monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    monkeypatch.setattr(select_path, "reason_against_own_iterator", lambda *_: reason)
    loader = made(seeding=seeding, num_workers=workers)
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            iter(loader)
        assert str(caught.value) == (
            "seeding cannot take effect where torch's own loader runs: the test wants it"
        )
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"
    assert len(list(made(seeding="torch", seed=None, num_workers=workers))) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_ringloader_off(workers, monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    with pytest.raises(RuntimeError, match="seeding cannot take effect where torch's own loader runs"):
        iter(made(num_workers=workers))


def test_threads_do_not_disturb_each_other():
    """Each has generators of its own, whatever the others draw meanwhile."""

    class Long(Drawing):
        def __getitem__(self, index):
            found = [drawn()[0]]
            for _ in range(20):
                time.sleep(0.0005)
                found.append(drawn()[0])
            return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        got = flat(made(Long(12), num_workers=4, worker_method="thread", batch_size=1))
    finally:
        sys.setswitchinterval(interval)
    assert got == [expected(key_of(SEED, 0, 0, 0, place), 21, True) for place in range(12)]


def test_nothing_is_left():
    threads = threading.active_count()
    for way in ("none", "two", "threads"):
        iterator = iter(made(**WAYS[way]))
        next(iterator)
        del iterator
    gc.collect()
    assert threading.active_count() == threads
