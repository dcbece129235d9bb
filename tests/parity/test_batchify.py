"""``ringloader.batchify`` as ``collate_fn``: by torch's loader and ours, and in whose memory batches are."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import ringloader
from parity.describe import describe
from parity.harness import Case, compare, run
from ringloader.batchify import Append, AsList, Dict, Group, Pad, Stack
from small_datasets import Made

LENGTHS = [1 + 37 * number % 90 for number in range(48)]
CONTEXTS = ["fork", "spawn", "forkserver"]


def row(index, kind=torch.int64):
    return torch.full((LENGTHS[index],), index + 1).to(kind)


class Ragged(Dataset):
    """Rows that hold their number, one larger, each of its own length."""

    def __init__(self, form=row):
        self.form = form

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return self.form(index)


def as_list(index):
    return row(index).tolist()


def as_array(index):
    return row(index).numpy().astype(np.int32)


def as_strided(index):
    return row(index).repeat_interleave(2)[::2]


def as_edges(index):
    """Columns of a matrix, as a graph's edges lie in that of all graphs."""
    return torch.arange(200).reshape(2, 100)[:, : LENGTHS[index]]


def as_floats(index):
    return row(index, torch.float32)


def as_halves(index):
    return row(index, torch.float64 if index % 2 else torch.float32)


def as_tuple(index):
    return row(index), index, f"text {index}"


def as_dict(index):
    return {"ids": as_list(index), "edges": as_edges(index), "label": 0.5 * index}


def needing_gradients(index):
    return as_floats(index).requires_grad_(index == 5)


class Shape(torch.Tensor):
    pass


def as_subclass(index):
    return as_floats(index).as_subclass(Shape)


def unlike(index):
    return torch.ones(2, 3 + index // 6)


CASES = {
    "tensors": (row, Pad(-100)),
    "lengths": (row, Pad(lengths=True, round_to=8)),
    "lists": (as_list, Pad(lengths=True)),
    "arrays": (as_array, Pad()),
    "arrays, widened": (as_array, Pad(dtype=torch.int64)),
    "arrays, to float": (as_array, Pad(dtype=np.float32)),
    "strided": (as_strided, Pad(7)),
    "edges": (as_edges, Pad(-1, axis=1, lengths=True)),
    "of several types": (as_halves, Pad()),
    "a subclass": (as_subclass, Pad()),
    "stacked": (as_dict, Dict(ids=AsList(), edges=Append(), label=Stack())),
    "in a tuple": (as_tuple, Group(Pad(lengths=True), Stack(), AsList())),
    "in a dict": (as_dict, Dict(ids=Pad(), edges=Pad(), label=Stack())),
    "one by one": (row, Append()),
    "not stackable": (row, Stack()),
    "not alike": (unlike, Pad(axis=0)),
    "a wrong number": (as_tuple, Group(Pad(), Stack())),
    "a wrong key": (as_dict, Dict(ids=Pad())),
    "a value that does not fit": (row, Pad(0.5)),
    "gradients": (needing_gradients, Pad()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torchs_loader(loader_class, name, workers):
    form, function = CASES[name]

    def build():
        return {"dataset": Ragged(form), "batch_size": 6, "num_workers": workers, "collate_fn": function}

    if workers == 0:
        # Torch's own loader has the last word there: our paths are for workers.
        assert (
            run(loader_class, Case(build)).outcomes == run(torch.utils.data.DataLoader, Case(build)).outcomes
        )
        return
    expected, _ = compare(loader_class, Case(build))
    assert len(expected.steps) >= 8


@pytest.mark.parametrize("name", ["tensors", "lists", "arrays, widened", "strided", "in a dict"])
def test_workers_make_what_the_main_process_makes(loader_class, name):
    form, function = CASES[name]
    made = [
        [describe(batch) for batch in loader_class(Ragged(form), 6, num_workers=workers, collate_fn=function)]
        for workers in (0, 2)
    ]
    assert made[0] == made[1]


@pytest.mark.rings_only
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("tensors", 1),
        ("lengths", 2),
        ("lists", 2),
        ("arrays", 1),
        ("arrays, widened", 1),
        ("strided", 1),
        ("edges", 2),
        ("in a dict", 3),
    ],
)
def test_batches_are_written_where_they_are_sent_from(loader_class, name, tensors):
    form, function = CASES[name]
    loader = loader_class(Ragged(form), batch_size=6, num_workers=2, collate_fn=function)
    assert len(list(loader)) == 8
    counters = ringloader.report(loader).counters
    # Beside tensors that an older torch pads, their lengths are a tensor of its own.
    is_native = hasattr(torch.Tensor, "__dlpack_c_exchange_api__") or name not in ("lengths", "edges")
    assert counters["in_place"] == 8 * (tensors if is_native else tensors - 1)
    assert counters["copied"] == (0 if is_native else 8)
    assert counters["pickled"] == counters["oversize"] == 0


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.limit(300)
def test_batches_that_are_kept_stay_as_they_are(loader_class, context):
    """Slots are filled again, and are full of other bytes by then."""
    loader = loader_class(
        Ragged(),
        batch_size=6,
        num_workers=2,
        collate_fn=Pad(-7, lengths=True),
        persistent_workers=True,
        multiprocessing_context=context,
    )
    expected = []
    for first in range(0, len(LENGTHS), 6):
        rows = [row(index) for index in range(first, first + 6)]
        batch = pad_sequence(rows, batch_first=True, padding_value=-7)
        expected.append((batch, torch.tensor([len(one) for one in rows])))
    kept = []
    for epoch in range(4):
        for number, (batch, lengths) in enumerate(loader):
            if number % 2 == epoch % 2:
                kept.append((number, batch, lengths))
            else:
                # The next user of this memory finds it so.
                batch.fill_(-1)
    assert len(kept) == 16
    for number, batch, lengths in kept:
        assert torch.equal(batch, expected[number][0]) and torch.equal(lengths, expected[number][1])


class Keeping(Dataset):
    """Pads in the worker's dataset, where it keeps what was made."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.kept.append((index, Pad(-index)([row(index), row(index + 1)])))
        sums = [Pad(-number)([row(number), row(number + 1)]).equal(batch) for number, batch in self.kept]
        return row(index), all(sums)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_pads_and_keeps_stays_as_it_is(loader_class, workers):
    loader = loader_class(
        Keeping(),
        batch_size=4,
        num_workers=workers,
        collate_fn=Group(Pad(), Stack()),
        persistent_workers=workers > 0,
    )
    for _ in range(3):
        for number, (batch, right) in enumerate(loader):
            assert right.all()
            assert torch.equal(batch, Pad()([row(index) for index in range(4 * number, 4 * number + 4)]))


def forking(index):
    """A child of the worker pads too, while the worker has a batch half done."""
    mine = Pad(5)([row(index), row(index + 1)])
    before = mine.clone()
    child = os.fork()
    if child == 0:
        theirs = [Pad(9)([row(3), row(4)]).fill_(-1) for _ in range(3)]
        os._exit(0 if all((one == -1).all() for one in theirs) else 1)
    _, status = os.waitpid(child, 0)
    return row(index), status == 0 and torch.equal(mine, before)


def test_a_child_of_a_worker_pads_in_memory_of_its_own(loader_class):
    loader = loader_class(Made(forking, 8), batch_size=2, num_workers=1, collate_fn=Group(Pad(), Stack()))
    for number, (batch, right) in enumerate(loader):
        assert right.all()
        assert torch.equal(batch, Pad()([row(2 * number), row(2 * number + 1)]))


def large(index):
    return torch.full((1 << 18, index % 3 + 1), index, dtype=torch.int64)


@pytest.mark.rings_only
def test_batches_larger_than_a_workers_share(loader_class):
    loader = loader_class(
        Made(large, 12), batch_size=3, num_workers=2, collate_fn=Pad(-1, axis=1), max_shared_bytes=8 << 20
    )
    for number, batch in enumerate(loader):
        assert batch.shape == (3, 1 << 18, 3)
        for place, sample in enumerate(batch):
            index = 3 * number + place
            assert (sample[:, : index % 3 + 1] == index).all() and (sample[:, index % 3 + 1 :] == -1).all()
    assert ringloader.report(loader).counters["oversize"] == 4


def pairs(index):
    """Rows of 64 KB to 256 KB that hold their number, and that number."""
    return torch.full(((index % 4 + 1) << 13,), index, dtype=torch.int64), index


def failing_at_every_third(numbers):
    if numbers[0] // 2 % 3 == 1:
        raise LookupError(f"the batch of {numbers[0]}")
    return torch.tensor(numbers)


@pytest.mark.rings_only
def test_an_error_in_the_middle_of_a_batch_gives_its_memory_back(loader_class):
    """The first field lies in the slot when the second fails. 10 MB of such go through 2 MB."""
    loader = loader_class(
        Made(pairs, 160),
        batch_size=2,
        num_workers=1,
        collate_fn=Group(Pad(-1), failing_at_every_third),
        max_shared_bytes=2 << 20,
    )
    iterator, kept, failed = iter(loader), None, 0
    for first in range(0, 160, 2):
        if first // 2 % 3 == 1:
            with pytest.raises(LookupError, match=f"the batch of {first}"):
                next(iterator)
            failed += 1
            continue
        batch, numbers = next(iterator)
        assert numbers.tolist() == [first, first + 1]
        for one in (batch, kept):
            if one is not None:
                for place, sample in enumerate(one):
                    number = int(sample[0])
                    size = (number % 4 + 1) << 13
                    assert number % 2 == place
                    assert (sample[:size] == number).all() and (sample[size:] == -1).all()
        kept = batch
    with pytest.raises(StopIteration):
        next(iterator)
    counters = ringloader.report(loader).counters
    assert failed == 27 and counters["oversize"] == 0
    assert counters["in_place"] >= 160 // 2 - failed


@pytest.mark.rings_only
def test_any_loader_of_torchs_that_is_converted():
    made = torch.utils.data.DataLoader(Ragged(), batch_size=6, num_workers=2, collate_fn=Pad(1))
    expected = list(made)
    loader = ringloader.convert(made)
    assert all(map(torch.equal, loader, expected))
    counters = ringloader.report(loader).counters
    assert counters["in_place"] == 8 and counters["copied"] == 0
    assert repr(pickle.loads(pickle.dumps(loader)).collate_fn) == "Pad(value=1)"
