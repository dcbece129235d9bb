"""``worker_task="sample"``: workers write to the rows of the batch, and nobody uses its memory too early."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ringloader import DataLoader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

N = 60
SAMPLES = {"worker_task": "sample", "seed": 7, "num_workers": 3}


def numbers(index):
    return index, float(index), index % 3 == 0


def tree(index):
    return {
        "image": torch.full((3, 40, 50), index, dtype=torch.uint8),
        "pair": (np.full((7,), index, np.int16), [torch.tensor(index), np.full((2, 1), -index / 7)]),
        "": index,
        "none": [],
        "names": {"b": float("nan"), "a": torch.full((1, 1), complex(index, 1))},
    }


SCALARS = [np.int64, np.uint8, np.float32, np.float64]
KINDS = {
    "tensor": lambda index: torch.full((30, 70), float(index)),
    "array": lambda index: np.full((30, 70), index, np.float32),
    "int": lambda index: index - 30,
    "bool": lambda index: index % 2 == 0,
    "scalar tensor": lambda index: torch.tensor(index, dtype=torch.int32),
    "numbers": numbers,
    "list": lambda index: [torch.ones(3, dtype=torch.bool), torch.full((5, 0, 2), index), index],
    "transposed": lambda index: (torch.arange(6.0).view(3, 2).t() + index, np.full((4, 3), index).T),
    "scalars": lambda index: [kind(index) for kind in SCALARS],
    "tree": tree,
    "large": lambda index: torch.full((100_000,), float(index)),
}


class Made(Dataset):
    """Samples of a function, each of which takes another time, long enough for batches to be cut."""

    def __init__(self, make, length=N):
        self.make = make
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.001 + os.urandom(1)[0] / 256 * 0.003)
        return self.make(index)


class Other(Dataset):
    """Some samples are not like the others."""

    def __init__(self, usual, other, others):
        self.usual, self.other, self.others = usual, other, others

    def __len__(self):
        return N

    def __getitem__(self, index):
        time.sleep(0.001 + os.urandom(1)[0] / 256 * 0.002)
        return self.other(index) if index in self.others else self.usual(index)


def described(value):
    """Returns all of a batch: types, order of names, bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return value.dtype, value.shape, value.stride(), raw
    if isinstance(value, dict):
        return [(name, described(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    return type(value), value


def outcomes(loader):
    """Returns each batch, described when it came, or its error."""
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(described(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error), str(error).splitlines()[-1]))


def bytes_of(fd):
    return 512 * os.fstat(fd).st_blocks


def slots_and_windows(iterator):
    transport = iterator._transport
    return transport.engine.segment, transport.scheduled.fds()[1]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_workers_are_the_batch(kind):
    dataset = Made(KINDS[kind])
    expected = outcomes(DataLoader(dataset, 8, num_workers=1))
    assert outcomes(DataLoader(dataset, 8, **SAMPLES)) == expected
    # All at once: more than may stay where they are.
    held = list(DataLoader(dataset, 8, prefetch_factor=2, **SAMPLES))
    assert [described(batch) for batch in held] == expected


@pytest.mark.slow
def test_rows_of_spawned_workers_are_the_batch():
    dataset = Other(tree, tree, ())
    loader = DataLoader(dataset, 8, multiprocessing_context="spawn", **SAMPLES)
    assert outcomes(loader) == outcomes(DataLoader(dataset, 8))


def test_rows_are_sent_where_they_were_written():
    loader = DataLoader(Made(KINDS["large"]), 16, persistent_workers=True, **SAMPLES)
    for _ in range(2):
        iterator = iter(loader)
        list(iterator)
    slots, windows = map(bytes_of, slots_and_windows(iterator))
    batch = 16 * 400_000
    assert slots < batch
    # Those under way, one that was kept and one that came.
    assert batch <= windows <= 6 * batch + (1 << 20)


OTHERS = {
    "shape": (lambda _: torch.ones(3), lambda _: torch.ones(4)),
    "dimensions": (lambda _: torch.ones(3), lambda _: torch.ones(3, 1)),
    "dtype": (lambda _: torch.ones(3), lambda _: torch.ones(3, dtype=torch.float64)),
    "array": (lambda _: torch.ones(3), lambda _: np.ones(3, np.float32)),
    "shape of an array": (lambda _: np.ones(3), lambda _: np.ones(5)),
    "float among ints": (lambda index: index, lambda index: index + 0.5),
    "int among floats": (lambda index: index + 0.5, lambda index: index),
    "bool among ints": (lambda index: index, lambda _: True),
    "large int": (lambda index: index, lambda _: 1 << 70),
    "tuple among lists": (lambda index: [index, torch.ones(2)], lambda index: (index, torch.zeros(2))),
    "length": (lambda index: [index, index], lambda index: [index]),
    "no items": (lambda index: [index], lambda _: []),
    "items among none": (lambda _: [], lambda index: [index]),
    "order of names": (lambda index: {"a": index, "b": 1.0}, lambda index: {"b": 2.0, "a": index}),
    "more names": (lambda index: {"a": index}, lambda index: {"b": 2.0, "a": index}),
    "fewer names": (lambda index: {"a": index, "b": 1.0}, lambda index: {"a": index}),
    "None": (lambda _: torch.ones(2), lambda _: None),
    "gradient": (lambda _: torch.ones(2), lambda _: torch.ones(2, requires_grad=True).exp()),
    "transposed": (lambda _: torch.ones(2, 3), lambda _: torch.arange(6.0).view(3, 2).t()),
    "transposed array": (lambda _: np.ones((2, 3)), lambda _: np.arange(6.0).reshape(3, 2).T),
    "transposed, of another shape": (lambda _: np.ones((2, 3)), lambda _: np.ones((2, 3)).T),
    "read-only": (lambda _: np.arange(3), lambda _: np.frombuffer(b"12345678" * 3, np.int64)),
    "text": (lambda index: (index, 1.0), lambda index: (index, "text")),
    "scalar of another type": (lambda index: np.float32(index), lambda index: np.float64(index)),
    "scalar that is a time": (lambda index: index, lambda index: np.datetime64(index, "s")),
    "scalar": (lambda index: index, lambda index: np.float32(index)),
    "set": (lambda index: (torch.ones(2), {"a": index}), lambda index: (torch.ones(2), {"a": {index}})),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_sample_that_does_not_fit_leaves_the_batch_to_collate_fn(kind):
    usual, other = OTHERS[kind]
    # First, last and in the middle of batches; alone, and all but one.
    others = {0, 15, 20, *range(24, 31), *range(49, 56)}
    dataset = Other(usual, other, others)
    expected = outcomes(DataLoader(dataset, 8, num_workers=1))
    for _ in range(2):
        assert outcomes(DataLoader(dataset, 8, **SAMPLES)) == expected


def test_samples_of_rows_that_are_read_back_are_the_same():
    """A batch with one sample that does not fit reads the rows of all others."""

    def sample(index):
        return tree(index) | {"n": (np.int32(index), float(index), index % 3 == 0)}

    def other(index):
        # torch makes a tensor of these bytes, if it makes one, in its own way.
        return sample(index) | {"n": (np.uint16(index), float(index), True)}

    dataset = Other(sample, other, {5, 17})
    assert outcomes(DataLoader(dataset, 8, **SAMPLES)) == outcomes(DataLoader(dataset, 8, num_workers=1))


def test_a_map_of_default_collate_that_was_changed_is_asked():
    from torch.utils.data._utils.collate import default_collate_fn_map as functions

    def twice(batch, *, collate_fn_map=None):  # noqa: ARG001
        return torch.tensor([2 * value for value in batch])

    dataset = Made(KINDS["int"], 16)
    own = functions[int]
    functions[int] = twice
    try:
        got = torch.cat(list(DataLoader(dataset, 8, **SAMPLES)))
    finally:
        functions[int] = own
    assert got.tolist() == [2 * (index - 30) for index in range(16)]


@pytest.mark.parametrize("size", [2000, 60_000], ids=["copied", "in place"])
def test_kept_batches_keep_their_bytes(size):
    """Whatever is kept and dropped, and in which thread, a batch is what it was when it came."""
    draw = random.Random(size)
    dataset = Made(lambda index: torch.full((size // 4,), index), 240)
    loader = DataLoader(dataset, 4, persistent_workers=True, prefetch_factor=3, **SAMPLES)
    kept = {}
    for epoch in range(2):
        for number, batch in enumerate(loader):
            kept[epoch, number] = batch, batch[:, -3:]
            del batch
            for key in draw.sample(sorted(kept), draw.randint(0, min(3, len(kept)))):
                whole, views = kept.pop(key)
                first = 4 * key[1]
                expected = torch.arange(first, first + 4, dtype=whole.dtype)
                assert (whole == expected[:, None]).all() and (views == expected[:, None]).all()
                dropping = threading.Thread(target=kept.pop, args=(key, None))
                del whole, views
                dropping.start()
                dropping.join()
    for (_, number), (whole, _views) in kept.items():
        assert (whole == torch.arange(4 * number, 4 * number + 4, dtype=whole.dtype)[:, None]).all()


def test_a_forked_child_has_the_batch_that_its_parent_had():
    iterator = iter(DataLoader(Made(KINDS["large"], 240), 4, **SAMPLES))
    next(iterator)
    batch = next(iterator)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        # By numpy: torch's threads are the parent's.
        is_same = (batch.numpy() == np.arange(4.0, 8.0)[:, None]).all()
        os._exit(0 if is_same else 1)
    os.close(reading)
    del batch
    # Each window is used again by then.
    for number, later in enumerate(iterator, 2):
        assert (later == torch.arange(4.0 * number, 4.0 * number + 4)[:, None]).all()
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_batch_outlives_its_loader_and_the_rest_is_given_back():
    iterator = iter(DataLoader(Made(KINDS["large"], 40), 8, **SAMPLES))
    kept = next(iterator)
    next(iterator)
    fd = os.dup(slots_and_windows(iterator)[1])
    try:
        assert bytes_of(fd) > 2 * kept.nbytes
        del iterator
        assert (kept == torch.arange(8.0)[:, None]).all()
        assert kept.nbytes <= bytes_of(fd) <= kept.nbytes + (1 << 18)
        del kept
        assert bytes_of(fd) == 0
    finally:
        os.close(fd)


class Dying(Made):
    """Kills its process, once for each sample of a set."""

    def __init__(self, make, folder, deaths):
        super().__init__(make)
        self.folder, self.deaths = folder, deaths

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        path = self.folder / str(index)
        if index in self.deaths and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


@pytest.mark.parametrize("deaths", [{0}, {7, 8}, {21, 40, N - 1}], ids=str)
def test_rows_of_a_worker_that_died_are_written_again(tmp_path, deaths):
    dataset = Dying(tree, tmp_path, deaths)
    got = outcomes(DataLoader(dataset, 8, restart_workers=len(deaths), **SAMPLES))
    assert {int(path.name) for path in tmp_path.iterdir()} == deaths
    assert got == outcomes(DataLoader(dataset, 8))


def test_epochs_that_are_given_up_leave_no_rows_to_the_next():
    loader = DataLoader(Made(KINDS["large"]), 8, persistent_workers=True, **SAMPLES)
    for taken in (1, 0, 3, 8, 2, 8):
        iterator = iter(loader)
        for number in range(taken):
            batch = next(iterator)
            assert (batch[:, 0] == torch.arange(8.0 * number, 8.0 * number + 8)[: len(batch)]).all()


@pytest.mark.parametrize("options", [{"main_prefetch": 2}, {"device": "cpu"}, {"in_order": False}], ids=str)
def test_rows_with_other_options(options):
    dataset = Made(KINDS["large"], 40)
    got = [described(batch) for batch in list(DataLoader(dataset, 8, **SAMPLES, **options))]
    expected = outcomes(DataLoader(dataset, 8))
    assert sorted(got, key=str) == sorted(expected, key=str)


def test_batches_too_large_for_their_memory_are_made_by_one_worker():
    dataset = Made(KINDS["large"], 24)
    got = outcomes(DataLoader(dataset, 8, max_shared_bytes=4 << 20, **SAMPLES))
    assert got == outcomes(DataLoader(dataset, 8))
