"""``worker_task="sample"``: all workers make one batch, and batches are equal bit by bit in any case."""

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

import ringloader
from ringloader import DataLoader, StatefulDataLoader
from ringloader.batchify import Pad
from small_datasets import Made

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

N = 37
SAMPLES = {"worker_task": "sample", "seed": 7}
WAYS = {
    "processes": {"num_workers": 2},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}
way = pytest.mark.parametrize("way", ["processes", "threads", pytest.param("spawn", marks=pytest.mark.slow)])


class Drawing(Dataset):
    """Samples with all kinds of leaves, and random numbers."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        # Some batch samplers give tensors.
        index = int(index)
        info = get_worker_info()
        if getattr(info, "worker_method", None) == "thread":
            rng = info.rng
            draws = rng.random_generator.random(), torch.rand(3, generator=rng.torch_generator)
        else:
            draws = random.random(), torch.rand(3)
        return {"index": index, "draws": draws, "array": np.arange(4.0) + index, "text": str(index)}


class Several(Drawing):
    def __getitems__(self, indices):
        assert len(indices) in (8, N % 8), "the batch was cut"
        return [self[index] for index in indices]


def drawing(samples):
    """A ``collate_fn`` that draws, and gives the samples as they are."""
    info = get_worker_info()
    if getattr(info, "worker_method", None) == "thread":
        return samples, torch.rand(2, generator=info.rng.torch_generator)
    return samples, torch.rand(2), random.random(), np.random.rand()


def writing(samples):
    """A ``collate_fn`` that writes to its samples, which are its own."""
    for sample in samples:
        sample["array"] += 1
        sample["draws"][1].mul_(2)
    return samples


def varying(samples):
    return [sample["draws"][1][: sample["index"] % 3 + 1] for sample in samples]


COLLATIONS = {"default": None, "drawing": drawing, "writing": writing, "varying": varying}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def batches(dataset=None, **options):
    torch.manual_seed(3)
    options = {"batch_size": 8, "shuffle": True, "seed": 7, **options}
    return list(DataLoader(Drawing() if dataset is None else dataset, **options))


@pytest.mark.parametrize("collation", COLLATIONS)
@pytest.mark.parametrize("dataset", [Drawing, Several])
def test_batches_are_equal_for_any_workers_and_both_values(collation, dataset):
    options = {"collate_fn": COLLATIONS[collation], "dataset": dataset()}
    expected = batches(seeding="sample", **options)
    for workers, value in itertools.product((0, 1, 2, 5), ("batch", "sample")):
        got = batches(num_workers=workers, worker_task=value, seeding="sample", **options)
        assert equal(got, expected), (workers, value)


@way
@pytest.mark.parametrize("collation", ["default", "drawing"])
def test_batches_are_equal_for_any_kind_of_workers(way, collation):
    if way == "threads" and collation == "drawing":
        # numpy's generators have another algorithm in threads, which the collate_fn there leaves out.
        expected = batches(seeding="sample", collate_fn=drawing, num_workers=1, worker_method="thread")
    else:
        expected = batches(seeding="sample", collate_fn=COLLATIONS[collation])
    got = batches(worker_task="sample", collate_fn=COLLATIONS[collation], **WAYS[way])
    assert equal(got, expected)


@way
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None, "shuffle": False},
        {"batch_size": 1},
        {"drop_last": True},
        {"batch_size": 1, "shuffle": None, "batch_sampler": [[3, 1], [], [5], list(range(20))]},
        {"batch_size": 1, "shuffle": None, "batch_sampler": [(3, 1), range(4), torch.tensor([7, 8, 9])]},
        {"prefetch_factor": 1},
        {"persistent_workers": True},
        {"timeout": 60},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_batches_are_equal_with_other_arguments(way, options):
    collate_fn = None if options.get("batch_size", 8) is None else list
    options = {"collate_fn": collate_fn, **options}
    of_workers = ("timeout", "prefetch_factor", "persistent_workers")
    without = {name: value for name, value in options.items() if name not in of_workers}
    assert equal(batches(worker_task="sample", **WAYS[way], **options), batches(seeding="sample", **without))


def test_batches_are_equal_where_a_thread_decodes_them():
    got = batches(worker_task="sample", num_workers=2, main_prefetch=2)
    assert equal(got, batches(seeding="sample"))


def test_installed_options_reach_torchs_loaders_and_leave_streams_their_batches():
    def made(dataset, **options):
        return torch.utils.data.DataLoader(dataset, 1, num_workers=2, **options)

    with ringloader.installed(worker_task="sample", seed=7):
        loader = made(Drawing())
        assert equal(list(loader), list(DataLoader(Drawing(), 1, seeding="sample", seed=7)))
        iterator = iter(loader)
        # torch's default is not taken for a number of all workers.
        assert iterator._all_workers.most_tasks() == 4
        del iterator
        stream = made(Stream())
        assert len(list(stream)) == 16
        assert "an IterableDataset" in ringloader.report(stream).reason


@way
def test_every_sample_comes_out_of_order(way):
    got = batches(in_order=False, collate_fn=list, **SAMPLES, **WAYS[way])
    expected = batches(seeding="sample", collate_fn=list)
    by_first = {batch[0]["index"]: batch for batch in got}
    assert len(got) == len(expected)
    assert all(equal(by_first[batch[0]["index"]], batch) for batch in expected)


def waits(index):
    time.sleep(0.002)
    return index


class Miscounted(list):
    """The index of a batch, whose length is another than the number of its samples."""

    def __init__(self, indices, length):
        super().__init__(indices)
        self.length = length

    def __len__(self):
        return self.length

    def __reduce__(self):
        return Miscounted, (list(iter(self)), self.length)


@way
@pytest.mark.parametrize("length", [1, 4, 5, 6, 13])
def test_no_sample_is_lost_where_an_index_has_another_length(way, length):
    indices = [Miscounted(range(5), length), range(5, 12)]
    loader = DataLoader(Made(waits, 12), batch_sampler=indices, **SAMPLES, **WAYS[way])
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [*range(5, 12)]]


def test_arrays_are_gathered_whole():
    dataset = TensorDataset(torch.arange(100.0).view(50, 2), torch.arange(50))
    options = {"num_workers": 2, "worker_task": "sample"}
    assert equal(batches(dataset, **options), batches(dataset, seeding="sample"))
    subset = Subset(Drawing(), range(20))
    assert equal(batches(subset, num_workers=2, worker_task="sample"), batches(subset, seeding="sample"))


class Slow(Dataset):
    """Samples that say who made them."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(0.02)
        info = get_worker_info()
        return index, info.id


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_all_workers_make_the_first_batch(way):
    options = {**SAMPLES, **WAYS[way], "num_workers": 4, "persistent_workers": True}
    loader = DataLoader(Slow(), 16, collate_fn=list, **options)
    list(loader)
    # All workers are there now.
    for number, batch in enumerate(loader):
        assert [index for index, _ in batch] == list(range(16 * number, 16 * number + 16))
        assert {worker for _, worker in batch} == {0, 1, 2, 3}


def test_more_batches_ahead_than_an_epoch_has_cost_nothing():
    """Each look for samples would pass over a million places."""
    loader = DataLoader(Made(waits, 400), 4, num_workers=2, prefetch_factor=10**6, **SAMPLES)
    assert [batch.tolist() for batch in loader] == [list(range(at, at + 4)) for at in range(0, 400, 4)]


def test_few_batches_are_under_way():
    loader = DataLoader(Slow(), 4, num_workers=4, **SAMPLES)
    assert loader.prefetch_factor == 4
    assert DataLoader(Slow(), 1, num_workers=4, **SAMPLES).prefetch_factor == 8
    assert DataLoader(Slow(), 4, num_workers=4, prefetch_factor=2, **SAMPLES).prefetch_factor == 2
    iterator = iter(loader)
    assert iterator._tasks_outstanding == 4
    next(iterator)


class Failing(Drawing):
    def __init__(self, *bad):
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            time.sleep(0.05 * (N - index) / N)
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


@way
def test_the_error_is_that_of_the_first_bad_sample_and_later_batches_come(way):
    def seen(**options):
        iterator = iter(DataLoader(Failing(9, 15, 30), 8, collate_fn=list, seed=7, **options))
        got = []
        while True:
            try:
                got.append([sample["index"] for sample in next(iterator)])
            except ValueError as error:
                got.append(str(error).splitlines()[-1])
            except StopIteration:
                return got

    expected = seen(num_workers=2, seeding="sample")
    assert "ValueError: sample 9 is bad" in expected
    assert seen(worker_task="sample", **WAYS[way]) == expected


def raising(samples):
    if samples[0]["index"] == 8:
        raise ValueError("no batch")
    return [sample["index"] for sample in samples]


@way
def test_an_error_of_collate_fn_is_its_batchs(way):
    iterator = iter(DataLoader(Drawing(), 8, collate_fn=raising, **SAMPLES, **WAYS[way]))
    assert next(iterator) == list(range(8))
    with pytest.raises(ValueError, match="no batch"):
        next(iterator)
    assert [len(batch) for batch in iterator] == [8, 8, 5]


def failing_init(worker):
    raise RuntimeError(f"init of {worker}")


@way
def test_an_error_of_worker_init_fn_is_raised(way):
    loader = DataLoader(Drawing(), 8, worker_init_fn=failing_init, **SAMPLES, **WAYS[way])
    with pytest.raises(RuntimeError, match="init of"):
        next(iter(loader))


class Flipped(Drawing):
    """Arrays with reversed axes, of which torch makes no tensors, and which are slow enough to be cut."""

    def __init__(self, shape, axes):
        self.shape, self.axes = shape, axes

    def __getitem__(self, index):
        time.sleep(0.002)
        return np.full(self.shape, index)[self.axes]


def strides_of(samples):
    return [(int(sample.max()), sample.strides) for sample in samples]


FLIPS = [
    ((6,), np.s_[::-1]),
    ((4, 6, 3), np.s_[:, ::-1]),
    ((1, 5), np.s_[::-1, ::-2]),
    ((3, 4), np.s_[2:0:-1, 1:3]),
]


@pytest.mark.parametrize(("shape", "axes"), FLIPS, ids=str)
def test_arrays_that_torch_refuses_are_refused_whoever_collates_them(shape, axes):
    iterator = iter(DataLoader(Flipped(shape, axes), 8, num_workers=2, **SAMPLES))
    for _ in range(5):
        with pytest.raises(ValueError, match="stride in the given numpy array is negative"):
            next(iterator)
    got = list(DataLoader(Flipped(shape, axes), 8, collate_fn=strides_of, num_workers=2, **SAMPLES))
    assert [number for batch in got for number, _ in batch] == list(range(N))
    assert all(min(strides) < 0 for batch in got for _, strides in batch)


class Unsendable(Drawing):
    def __getitem__(self, index):
        # No pickle, and a sample that takes long enough for batches to be cut.
        time.sleep(0.001)
        return index, (lambda: index)


def called(samples):
    return [(index, function()) for index, function in samples]


def test_samples_that_cannot_be_sent_are_made_by_one_worker():
    dataset = Unsendable()
    expected = [[(index, index) for index in range(at, min(at + 4, N))] for at in range(0, N, 4)]
    assert list(DataLoader(dataset, 4, collate_fn=called, num_workers=3, **SAMPLES)) == expected


class Dying(Drawing):
    """Kills its process once at a sample."""

    def __init__(self, path, at):
        self.path, self.at = path, at

    def __getitem__(self, index):
        time.sleep(0.005)
        if index == self.at and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("at", [0, 7, 20, N - 1])
def test_a_worker_that_dies_is_restarted_and_its_samples_are_made_again(tmp_path, at):
    expected = batches(seeding="sample", shuffle=False)
    dataset = Dying(tmp_path / "died", at)
    got = batches(dataset, shuffle=False, num_workers=2, worker_task="sample", restart_workers=1)
    assert dataset.path.exists()
    assert equal(got, expected)


def dying_collate(samples):
    path = Path(os.environ["RINGLOADER_TEST_DIED"])
    if samples[0]["index"] == 8 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return samples


def test_a_worker_that_dies_while_it_collates_is_restarted(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGLOADER_TEST_DIED", str(tmp_path / "died"))
    options = {"shuffle": False, "num_workers": 2, "worker_task": "sample", "restart_workers": 1}
    got = batches(collate_fn=dying_collate, **options)
    assert (tmp_path / "died").exists()
    assert equal(got, batches(seeding="sample", shuffle=False, collate_fn=list))


def test_a_worker_that_dies_is_an_error_and_the_others_go_on(tmp_path):
    dataset = Dying(tmp_path / "died", 3)
    iterator = iter(DataLoader(dataset, 8, num_workers=2, collate_fn=list, **SAMPLES))
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(iterator)
    assert any("batch 0 of the epoch" in note for note in caught.value.__notes__)
    assert [[sample["index"] for sample in batch] for batch in iterator] == [
        list(range(at, min(at + 8, N))) for at in range(0, N, 8)
    ]


class Exiting(Drawing):
    def __getitem__(self, index):
        if index == 3 and not os.environ.get("RINGLOADER_TEST_DIED"):
            os.environ["RINGLOADER_TEST_DIED"] = "1"
            raise SystemExit
        return super().__getitem__(index)


def test_a_thread_that_ends_is_an_error_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("RINGLOADER_TEST_DIED", "")
    iterator = iter(DataLoader(Exiting(), 8, collate_fn=list, **SAMPLES, **WAYS["threads"]))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)
    assert [len(batch) for batch in iterator] == [8, 8, 8, 8, 5]


@way
def test_epochs_that_are_given_up_leave_nothing_for_the_next(way):
    loader = DataLoader(Drawing(), 4, collate_fn=list, persistent_workers=True, **SAMPLES, **WAYS[way])
    whole = [list(range(at, min(at + 4, N))) for at in range(0, N, 4)]
    for taken in (1, 0, 3, 10, 2, 10):
        iterator = iter(loader)
        got = [[sample["index"] for sample in next(iterator)] for _ in range(taken)]
        assert got == whole[:taken]


@way
def test_an_iterator_that_is_dropped_in_the_middle_ends(way):
    for taken in range(3):
        iterator = iter(DataLoader(Slow(), 4, **SAMPLES, **WAYS[way]))
        for _ in range(taken):
            next(iterator)
        del iterator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pt_data_worker")]


def test_samples_too_large_for_the_memory_are_made_by_one_worker():
    dataset = Large()
    got = list(DataLoader(dataset, 8, num_workers=2, max_shared_bytes=1 << 20, **SAMPLES))
    assert equal(got, list(DataLoader(dataset, 8)))


def test_many_batches_ahead_stay_within_the_bound():
    options = {"max_shared_bytes": 4 << 20, "prefetch_factor": 50}
    iterator = iter(DataLoader(Made(of_40_kb, 600), 4, num_workers=2, **options, **SAMPLES))
    transport = iterator._transport
    fds = [transport.engine.segment, *transport.scheduled.fds()]
    most = 0
    for _ in iterator:
        most = max(most, sum(512 * os.fstat(fd).st_blocks for fd in fds))
    assert 1 << 20 < most < 5 << 20


def of_40_kb(index):
    return torch.full((10_000,), float(index))


def test_a_batch_with_more_indices_than_its_memory_has_room_for():
    options = {"max_shared_bytes": 1 << 20, "batch_size": 20_000, "num_workers": 2}
    (batch,) = DataLoader(range(20_000), **options, **SAMPLES)
    assert torch.equal(batch, torch.arange(20_000))


class Large(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.001)
        return np.full(100_000, index)


def test_a_state_goes_on():
    def made():
        return StatefulDataLoader(Drawing(), 4, num_workers=2, collate_fn=list, **SAMPLES)

    whole = list(made())
    loader = made()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    again = made()
    again.load_state_dict(state)
    assert equal(list(again), whole[3:])


def test_padding_is_the_same():
    def made(**options):
        return list(DataLoader(Ragged(), 8, collate_fn=Pad(), **options))

    assert equal(made(num_workers=2, **SAMPLES), made())


class Ragged(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((index % 5 + 1,), float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Stateful(Drawing):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seeding": "torch"}, "must be the sample's"),
        ({"seeding": "batch"}, "must be the sample's"),
        ({"seeding": "epoch"}, "must be the sample's"),
        ({"dataset": Stream()}, "an IterableDataset"),
    ],
)
def test_what_does_not_go_together_is_refused(options, text):
    dataset = options.pop("dataset", Drawing())
    with pytest.raises(ValueError, match=text):
        DataLoader(dataset, num_workers=2, worker_task="sample", **options)


def test_datasets_with_a_state_are_refused():
    with pytest.raises(ValueError, match="state_dict"):
        iter(StatefulDataLoader(Stateful(), num_workers=2, worker_task="sample"))
    with pytest.raises(ValueError, match="worker_task"):
        DataLoader(Drawing(), worker_task="run")


def test_a_loader_without_workers_seeds_each_sample():
    assert equal(batches(worker_task="sample"), batches(seeding="sample"))
    assert not equal(batches(worker_task="sample"), batches(worker_task="sample", seed=8))
