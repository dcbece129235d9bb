"""``seeding=``: the same random numbers for any workers, by the formula of the documents."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from seeding_parts import (
    SEED,
    WAYS,
    Drawing,
    Following,
    N,
    Several,
    Stream,
    drawn,
    expected,
    flat,
    key_of,
    key_of_batch,
    made,
    samples,
)
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

import ringloader
from ringloader import ArrayDataset, DataLoader, Dispatch, WorkerPool
from ringloader._features.arrays import Rows
from ringloader._torch import select_path

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


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
        ({"seeding": "worker"}, ValueError, "seeding must be one of .*'batch'.*, not 'worker'"),
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


def test_nothing_is_left():
    threads = threading.active_count()
    for way in ("none", "two", "threads"):
        iterator = iter(made(**WAYS[way]))
        next(iterator)
        del iterator
    gc.collect()
    assert threading.active_count() == threads


class Global(Dataset):
    """Draws from the generators of the process."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return random.random()


def test_the_log_says_what_threads_do_not_repeat(caplog, monkeypatch):
    monkeypatch.setattr(select_path, "_logged", set())
    for options in ({}, {"seeding": "sample", "num_workers": 2}):
        list(DataLoader(Global(), **options))
    list(DataLoader(Global(), num_workers=2, worker_method="thread"))
    assert not caplog.records
    for _ in range(2):
        list(DataLoader(Global(), num_workers=2, worker_method="thread", seeding="sample"))
    (record,) = caplog.records
    assert "only numbers from get_worker_info().rng repeatable" in record.getMessage()
