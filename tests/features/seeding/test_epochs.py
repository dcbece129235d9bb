"""``worker_reset_fn``, ``seeding="epoch"`` and ``set_epoch``: what an epoch begins with, on every path."""

import gc
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import ringloader
from ringloader import DataLoader
from ringloader._torch import select_path

pytestmark = pytest.mark.rings_only

PATHS = ["native", "torch", "without workers"]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
        # The time that torch waits for a worker whose results nobody took.
        monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    yield request.param
    gc.collect()


@pytest.fixture(params=["native", "without workers"])
def own_path(request):
    """Returns a path on which options may change what begins an epoch."""
    return request.param


def made(path, dataset, persistent=False, **options):
    workers = 0 if path == "without workers" else 2
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        **options,
    )


class Epochs(Dataset):
    """Says what it was told last, in this process."""

    def __init__(self, count=6):
        self.count = count
        self.epoch = None
        self.resets = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, self.epoch, list(self.resets)

    def set_epoch(self, epoch):
        self.epoch = epoch


class Streamed(IterableDataset):
    """Says what was noted when its iterator was made."""

    def __init__(self, noted=()):
        self.noted = list(noted)
        self.iterated = 0

    def __iter__(self):
        # Not a generator: this runs when torch makes its fetcher.
        self.iterated += 1
        return iter([(number, list(self.noted), self.iterated) for number in range(2)])


def note(dataset, info, seeds):
    dataset.resets.append([info.id, info.num_workers, info.dataset is dataset, seeds.epoch])


@pytest.mark.parametrize("persistent", [False, True])
def test_it_is_called_at_the_start_of_each_epoch(own_path, persistent):
    dataset = Epochs()
    loader = made(own_path, dataset, persistent, worker_reset_fn=note)
    for epoch in range(3):
        if epoch == 2:
            next(iter(loader))  # An abandoned epoch is one.
        for index, _, resets in loader:
            worker = 0 if own_path == "without workers" else index % 2
            last = epoch if epoch < 2 else 3
            first = 0 if persistent or own_path == "without workers" else last
            workers = 1 if own_path == "without workers" else 2
            assert resets == [[worker, workers, True, one] for one in range(first, last + 1)], index
    assert bool(dataset.resets) == (own_path == "without workers"), "the main process has another copy"


def other_dataset(dataset, info, seeds):
    return [f"{info.id} {seeds.epoch} {number}" for number in range(len(dataset))]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_dataset_that_it_returns_is_that_of_the_epoch(own_path, persistent):
    loader = made(own_path, list(range(4)), persistent, worker_reset_fn=other_dataset)
    of = (lambda _: 0) if own_path == "without workers" else (lambda number: number % 2)
    for epoch in range(2):
        assert list(loader) == [f"{of(number)} {epoch} {number}" for number in range(4)]


def other_stream(dataset, info, seeds):
    if seeds.epoch == 1:
        return None
    assert dataset.iterated == 0 or seeds.epoch == 2
    return Streamed([f"worker {info.id}, epoch {seeds.epoch}"])


@pytest.mark.parametrize("persistent", [False, True])
def test_the_iterator_of_an_iterable_dataset_is_made_of_what_it_returns(own_path, persistent):
    dataset = Streamed()
    loader = made(own_path, dataset, persistent, worker_reset_fn=other_stream)
    for epoch in range(3):
        found = sorted(noted for _, noted, _ in loader)
        workers = 1 if own_path == "without workers" else 2
        texts = [[f"worker {worker}, epoch {epoch}"] if epoch != 1 else [] for worker in range(workers)]
        assert found == sorted([*texts, *texts])


def fails(_dataset, info, seeds):
    if seeds.epoch == 1 and info.id == 0:
        raise LookupError("no epoch today")


@pytest.mark.parametrize("persistent", [False, True])
def test_what_it_raises_is_the_error_of_the_epochs_batches(own_path, persistent):
    loader = made(own_path, Epochs(4), persistent, worker_reset_fn=fails)
    assert len(list(loader)) == 4
    iterator = iter(loader)
    raised = 0
    for number in range(4):
        if number % 2 == 0 or own_path == "without workers":
            with pytest.raises(LookupError, match="no epoch today"):
                next(iterator)
            raised += 1
        else:
            assert next(iterator)[0] == number
    with pytest.raises(StopIteration):
        next(iterator)
    assert raised == (4 if own_path == "without workers" else 2)
    assert len(list(loader)) == 4, "the workers live"
    del iterator
    loader._iterator = None


class Refuses(torch.utils.data.Sampler):
    """A sampler that raises while ``is_closed``."""

    is_closed = False

    def __init__(self):
        pass

    def __len__(self):
        return 4

    def __iter__(self):
        if self.is_closed:
            raise LookupError("no order today")
        return iter(range(4))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_could_not_begin_does_not_count(own_path, persistent):
    """The next one has its number, and so its seeds."""
    sampler = Refuses()
    loader = made(own_path, [0] * 4, persistent, worker_reset_fn=other_dataset, sampler=sampler)
    of = (lambda _: 0) if own_path == "without workers" else (lambda number: number % 2)
    for epoch in range(3):
        sampler.is_closed = True
        with pytest.raises(LookupError, match="no order today"):
            iter(loader)
        sampler.is_closed = False
        assert list(loader) == [f"{of(number)} {epoch} {number}" for number in range(4)]


def test_an_iterable_dataset_whose_epoch_cannot_begin_ends(own_path):
    loader = made(own_path, Streamed(), worker_reset_fn=fails)
    list(loader)
    iterator = iter(loader)
    with pytest.raises(LookupError, match="no epoch today"):
        next(iterator)
    assert len(list(iterator)) == (0 if own_path == "without workers" else 2)


def stops(*_):
    raise StopIteration


def test_that_it_stops_is_no_end_of_the_epoch(own_path):
    with pytest.raises(RuntimeError, match="worker_reset_fn raised StopIteration"):
        next(iter(made(own_path, Streamed(), worker_reset_fn=stops)))


class Drawing(Dataset):
    """A worker's generators, and the seeds that its reset function was given."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        numbers = random.getrandbits(62), int(np.random.randint(1 << 62)), int(torch.randint(1 << 62, ()))
        return index, numbers, getattr(self, "seeds", [])


def keep_seeds(dataset, _info, seeds):
    dataset.seeds = [seeds.shared(), seeds.shared(), seeds.unique(), seeds.unique()]


def drawn(start="fork", persistent=False, workers=2, epochs=2, first=0, **options):
    torch.manual_seed(3)
    loader = DataLoader(
        Drawing(),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=start if workers else None,
        persistent_workers=persistent,
        worker_reset_fn=keep_seeds,
        **options,
    )
    loader.set_epoch(first)
    return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_seeds_and_generators_are_equal_over_start_methods_and_the_life_of_workers(start):
    expected = drawn(seeding="epoch", seed=11)
    assert drawn(start, True, seeding="epoch", seed=11) == expected
    assert drawn(start, False, seeding="epoch", seed=11) == expected
    # An epoch is the same wherever the program begins.
    assert drawn(start, True, seeding="epoch", seed=11, first=1, epochs=1) == expected[1:]
    assert drawn(seeding="epoch", seed=12) != expected


def test_every_epoch_and_worker_has_numbers_of_its_own():
    epochs = drawn(persistent=True, seeding="epoch", seed=11, epochs=3)
    for kind in range(3):
        numbers = [batch[1][kind] for epoch in epochs for batch in epoch]
        assert len(set(numbers)) == 12
    seeds = [batch[2] for epoch in epochs for batch in epoch]
    assert [len({tuple(found[:2]) for _, _, found in epoch}) for epoch in epochs] == [1, 1, 1], "shared"
    assert len({one for found in seeds for one in found}) == 3 * 2 + 3 * 2 * 2


def test_without_workers_the_programs_generators_are_left_alone():
    torch.manual_seed(3)
    first = [batch[1][2] for batch in DataLoader(Drawing(), batch_size=None, seeding="epoch")]
    torch.manual_seed(3)
    assert first == [batch[1][2] for batch in torch.utils.data.DataLoader(Drawing(), batch_size=None)]


@pytest.mark.parametrize("options", [{}, {"worker_reset_fn": keep_seeds, "seeding": "epoch"}])
def test_the_main_process_draws_as_torch_does(path, options):
    if options and path == "torch":
        pytest.skip("an error there")

    def after(cls, **options):
        torch.manual_seed(4)
        random.seed(4)
        workers = 0 if path == "without workers" else 2
        for _ in range(2):
            list(cls(Drawing(), batch_size=2, shuffle=True, num_workers=workers, **options))
        return torch.get_rng_state().tolist(), random.getstate()

    assert after(DataLoader, **options) == after(torch.utils.data.DataLoader)


def test_ranks_have_different_seeds_and_agree_where_they_are_given_one(monkeypatch):
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append([seeds for epoch in drawn(seed=5, workers=1) for *_, seeds in epoch[:1]])
    for one, other in zip(*found, strict=True):
        assert one[:2] == other[:2]
        assert not set(one[2:]) & set(other[2:])
    with pytest.raises(RuntimeError, match=r"seeds.shared\(\) must be equal on all ranks.*DataLoader\(seed="):
        drawn(workers=1)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_told_the_epoch_before_it_begins(path, persistent):
    if path == "torch" and persistent:
        pytest.skip("torch's own transport carries no calls")
    loader = made(path, Epochs(), persistent)
    for epoch in (7, 3, 3, 9):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        assert next(iterator)[1] == epoch
        if path != "without workers":
            # Numbers that are said in the middle of an epoch count from the next one on.
            loader.set_epoch(1000)
        assert {told for _, told, _ in iterator} == {epoch}
    # Said in the middle of the last one, and not since: it counts once, for as long as the dataset keeps it.
    expected = 9 if path == "without workers" else 1000
    assert {told for _, told, _ in loader} == {expected}
    assert loader.dataset.epoch == expected


class Interrupted(torch.utils.data.BatchSampler):
    """Raises once where it is iterated."""

    is_to_raise = False

    def __iter__(self):
        if self.is_to_raise:
            self.is_to_raise = False
            raise KeyboardInterrupt
        return super().__iter__()


def test_an_epoch_that_cannot_begin_leaves_its_number_to_the_next():
    dataset = Epochs()
    sampler = Interrupted(range(6), 2, False)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True, collate_fn=list
    )
    loader.set_epoch(1)
    assert {told for batch in loader for _, told, _ in batch} == {1}
    loader.set_epoch(2)
    sampler.is_to_raise = True
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert {told for batch in loader for _, told, _ in batch} == {2}


@pytest.mark.parametrize("is_late", [False, True], ids=["before the base seed", "after it"])
def test_an_iter_that_raises_has_drawn_what_torchs_has_and_is_not_counted(is_late):
    resets = []

    def left_by(cls, **options):
        generator = torch.Generator().manual_seed(3)
        loader = cls(
            range(6),
            batch_size=None,
            sampler=DrawsInIter(generator, raises=not is_late),
            generator=generator,
            timeout=float(is_late),
            **options,
        )
        with pytest.raises(AssertionError):
            iter(loader)
        return loader, generator.get_state().tolist()

    _, torchs = left_by(torch.utils.data.DataLoader)
    loader, ours = left_by(DataLoader, worker_reset_fn=lambda _data, _info, seeds: resets.append(seeds.epoch))
    assert ours == torchs
    assert ours != torch.Generator().manual_seed(3).get_state().tolist()
    loader.sampler.raises, loader.timeout = False, 0
    iter(loader)
    assert resets == [0]


class DrawsInIter(torch.utils.data.Sampler):
    """Draws where it is iterated, and may raise then."""

    def __init__(self, generator, raises):
        self.generator = generator
        self.raises = raises

    def __iter__(self):
        first = int(torch.randint(6, (), generator=self.generator))
        assert not self.raises
        return iter([first])


def test_the_successor_of_a_lost_worker_is_told_the_epoch_that_runs():
    loader = DataLoader(Epochs(40), batch_size=None, num_workers=1, restart_workers=1)
    loader.set_epoch(1)
    iterator = iter(loader)
    assert next(iterator)[1] == 1
    # Of the next epoch: the successor gets the dataset as it now is here.
    loader.set_epoch(2)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    found = list(iterator)
    assert len(found) == 39
    assert {told for _, told, _ in found} == {1}


def test_that_torchs_persistent_workers_cannot_be_told_is_said(path, caplog, monkeypatch):
    if path != "torch":
        pytest.skip("the others can")
    monkeypatch.setattr(select_path, "_logged", set())
    loader = made(path, Epochs(), persistent=True)
    list(loader)
    loader.set_epoch(1)
    assert "set_epoch() does not reach persistent workers on torch's own path" in caplog.text


class Refusing(Epochs):
    def set_epoch(self, epoch):
        if get_worker_info() is not None:
            raise LookupError(f"no epoch {epoch} here")


def test_what_the_dataset_raises_in_a_worker_is_the_error_of_the_epoch():
    loader = made("native", Refusing(), persistent=True)
    assert len(list(loader)) == 6
    loader.set_epoch(4)
    with pytest.raises(LookupError, match="no epoch 4 here"):
        next(iter(loader))
    assert len(list(loader)) == 6


def test_samplers_are_told_once_each():
    class Told(DistributedSampler):
        told = 0

        def set_epoch(self, epoch):
            self.told += 1
            super().set_epoch(epoch)

    sampler = Told(range(8), 1, 0, seed=1)
    loader = DataLoader(range(8), batch_size=2, sampler=sampler, num_workers=1, last_batch="rollover")
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([batch.tolist() for batch in loader])
    assert sampler.told == 3
    assert orders[0] == orders[2] != orders[1]
    batches = torch.utils.data.BatchSampler(sampler, 2, False)
    DataLoader(range(8), batch_sampler=batches).set_epoch(5)
    assert (sampler.epoch, sampler.told) == (5, 4)


def test_seeds_are_of_the_epoch_that_was_said():
    """In persistent workers too, whose epochs count up between."""
    loader = made("native", Epochs(2), True, worker_reset_fn=note)
    found = []
    for said in (None, 5, None, 0, None):
        if said is not None:
            loader.set_epoch(said)
        *_, last = loader
        found.append(last[2][-1][-1])
    assert found == [0, 5, 6, 0, 1]
    loader._iterator = None
    *_, last = loader
    assert last[2] == [[1, 2, True, 2]], "and where the workers are started anew"


@pytest.mark.parametrize("taken_by", ["class", "install", "convert"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"worker_reset_fn": 1}, TypeError, "worker_reset_fn must be a callable or None, not 1"),
        ({"worker_reset_fn": "f"}, TypeError, "worker_reset_fn must be a callable or None, not 'f'"),
        ({"seed": 1.5}, TypeError, "seed must be an int or None, not 1.5"),
        ({"seed": -1}, ValueError, "seed must be from 0 up to and without 18446744073709551616, not -1"),
        (
            {"seed": 5},
            ValueError,
            "seed=5 has no effect without worker_reset_fn, or seeding",
        ),
    ],
)
def test_what_is_wrong_is_said_at_once(options, error, text, taken_by):
    with pytest.raises(error, match=text):
        if taken_by == "class":
            DataLoader([1], **options)
        elif taken_by == "install":
            ringloader.install(**options)
        else:
            ringloader.convert(torch.utils.data.DataLoader([1]), **options)


@pytest.mark.parametrize(("epoch", "error"), [(1.0, TypeError), (True, TypeError), (-1, ValueError)])
def test_an_epoch_that_is_none(epoch, error):
    with pytest.raises(error, match=f"epoch must be .* not {epoch}"):
        DataLoader([1]).set_epoch(epoch)


class Nested(Dataset):
    """With a loader of its own."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return list(torch.utils.data.DataLoader([index], batch_size=None))


def only_nested(dataset, _info, _seeds):
    if not isinstance(dataset, Nested):
        raise LookupError("called for a loader in a worker")


def test_loaders_of_other_classes_and_those_in_a_worker():
    with ringloader.installed(worker_reset_fn=only_nested):
        loader = torch.utils.data.DataLoader(Nested(), batch_size=None, num_workers=1)
        assert list(loader) == [[0], [1]]
    with ringloader.installed(worker_reset_fn=fails):
        loader = torch.utils.data.DataLoader(Nested(), batch_size=None, num_workers=1)
        assert list(loader) == [[0], [1]]
        with pytest.raises(LookupError, match="no epoch today"):
            list(loader)


def doubled(dataset, _info, seeds):
    return torch.utils.data.TensorDataset(dataset.tensors[0] * (seeds.epoch + 1))


@pytest.mark.parametrize("persistent", [False, True])
def test_rows_that_are_gathered_are_those_of_the_epochs_dataset(own_path, persistent):
    """With options of two kinds, and with one that comes while the worker lives."""
    dataset = torch.utils.data.TensorDataset(torch.arange(6))
    workers = 0 if own_path == "without workers" else 1
    options = {"batch_size": 3, "num_workers": workers, "persistent_workers": persistent and workers > 0}
    loader = DataLoader(dataset, worker_reset_fn=doubled, **options)
    plain = DataLoader(dataset, **options)
    for epoch in range(3):
        plain.set_epoch(epoch)
        assert [batch[0].tolist() for batch in plain] == [[0, 1, 2], [3, 4, 5]]
        scale = epoch + 1
        assert [batch[0].tolist() for batch in loader] == [
            [0, scale, 2 * scale],
            [3 * scale, 4 * scale, 5 * scale],
        ]


def fetcher_of(_dataset):
    """Returns the type of what the worker loop asks for batches in this worker."""
    frame = sys._getframe()
    while "fetcher" not in frame.f_locals:
        frame = frame.f_back
    return type(frame.f_locals["fetcher"]).__name__


def test_a_worker_that_is_told_the_epoch_keeps_its_other_options():
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, persistent_workers=True
    )
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert len(list(loader)) == 2
        assert loader.call_workers(fetcher_of) == ["Gathering"]


def below(dataset, wrapping):
    from torch.utils.data import ConcatDataset, StackDataset, Subset

    return {
        "Subset": lambda: Subset(Subset(dataset, range(4)), [0, 1]),
        "ConcatDataset": lambda: ConcatDataset([dataset, dataset]),
        "StackDataset": lambda: StackDataset(a=dataset),
    }[wrapping]()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("wrapping", ["Subset", "ConcatDataset", "StackDataset"])
def test_a_dataset_inside_torchs_own_is_told(wrapping, persistent):
    told = Epochs(2)
    loader = DataLoader(
        below(told, wrapping),
        batch_size=None,
        num_workers=1,
        persistent_workers=persistent,
        collate_fn=lambda one: one["a"] if wrapping == "StackDataset" else one,
    )
    for epoch in (3, 4):
        loader.set_epoch(epoch)
        assert told.epoch == epoch
        assert {seen for _, seen, _ in loader} == {epoch}


def test_a_wrapping_dataset_with_its_own_set_epoch_is_told_alone():
    class Own(torch.utils.data.Subset):
        def set_epoch(self, epoch):
            self.epoch = epoch

    told = Epochs(2)
    wrapper = Own(told, [0, 1])
    DataLoader(wrapper).set_epoch(5)
    assert (wrapper.epoch, told.epoch) == (5, None)


def test_a_dataset_that_contains_itself():
    inner = torch.utils.data.ConcatDataset([[1], [2]])
    inner.datasets.append(inner)
    DataLoader(inner, sampler=[0]).set_epoch(1)
