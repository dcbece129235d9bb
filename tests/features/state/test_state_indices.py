"""Indices of any type: compared at a resume, counted, and kept by a rollover."""

import itertools
import json

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, SubsetRandomSampler

import ringloader
from ringloader import StatefulDataLoader
from small_datasets import Made

pytestmark = pytest.mark.rings_only

N = 22


def anything(index):
    """Gives the index itself, as text: tensors have no value to compare."""
    return f"{type(index).__name__} {index}"


class Other:
    """Has no value that is known."""

    def __repr__(self):
        return "Other"


TYPES = {
    "int": int,
    "numpy": numpy.int64,
    "small numpy": numpy.int8,
    "tensor": torch.tensor,
    "tuple": lambda index: (index, f"part {index}"),
    "deep": lambda index: (index, (numpy.int32(index), [0.5, None, b"x"])),
    "text": str,
    "bytes": lambda index: b"%d" % index,
    "float": lambda index: index + 0.25,
    "long": lambda index: index + (1 << 70),
    "long negative": lambda index: -index - (1 << 70),
    "array": lambda index: numpy.arange(index, index + 3),
}
SAMPLERS = {
    "list": lambda indices: {"sampler": indices, "batch_size": 4},
    "subset": lambda indices: {
        "sampler": SubsetRandomSampler(indices, generator=torch.Generator().manual_seed(3)),
        "batch_size": 4,
    },
    "batches": lambda indices: {"batch_sampler": BatchSampler(indices, 4, False)},
    "own batches": lambda indices: {"batch_sampler": [indices[at : at + 4] for at in range(0, N, 4)]},
    "samples": lambda indices: {"sampler": indices, "batch_size": None},
    "rollover": lambda indices: {"sampler": indices, "batch_size": 4, "last_batch": "rollover"},
}


def made(kind, indices, workers=0, **options):
    return StatefulDataLoader(
        Made(anything, N), collate_fn=list, num_workers=workers, **SAMPLERS[kind](indices), **options
    )


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def stopped(loader, batches=3):
    iterator = iter(loader)
    list(itertools.islice(iterator, batches))
    return json.loads(json.dumps(loader.state_dict())), list(iterator)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("name", TYPES)
def test_other_indices_are_refused_and_equal_ones_go_on(name, kind, workers):
    indices = [TYPES[name](index) for index in range(N)]
    state, rest = stopped(made(kind, indices, workers))
    again = made(kind, [TYPES[name](index) for index in range(N)], workers)
    again.load_state_dict(state)
    assert list(again) == rest
    others = [TYPES[name](index) for index in (1, 0, *range(2, N))]
    if kind == "subset":
        # Its order is drawn: nearly all of them.
        others = [TYPES[name](index + 1) for index in range(N)]
    again = made(kind, others, workers)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="are not those that the"):
        next(iter(again))


@pytest.mark.parametrize("kind", ["list", "subset", "own batches"])
def test_an_index_is_compared_by_its_value(kind):
    state, _ = stopped(made(kind, list(range(N))))
    for name in ("numpy", "tensor"):
        again = made(kind, [TYPES[name](index) for index in range(N)])
        again.load_state_dict(state)
        assert len(list(again)) == 3
    again = made(kind, [float(index) for index in range(N)])
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="are not those that the"):
        next(iter(again))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_fingerprint_of_the_same_values_is_the_same(workers):
    sums = {}
    for name in TYPES:
        loader = made("list", [TYPES[name](index) for index in range(N)], workers)
        list(loader)
        sums[name] = loader.fingerprint()
    assert sums["int"] == sums["numpy"] == sums["small numpy"] == sums["tensor"]
    assert len(set(sums.values())) == len(TYPES) - 3 and None not in sums.values()
    loader = made("list", [Other() for _ in range(N)])
    list(loader)
    assert loader.fingerprint() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_whose_value_is_not_known_is_not_compared(workers):
    state, rest = stopped(made("list", [(index, Other()) for index in range(N)], workers))
    again = made("list", [(index, Other()) for index in range(N)], workers)
    again.load_state_dict(state)
    assert list(again) == rest


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["list", "batches", "own batches"])
def test_nones_are_as_many_samples_as_they_are(kind, workers):
    loader = made(kind, [None] * N, workers)
    for epoch in range(2):
        state, rest = stopped(loader, 2)
        again = made(kind, [None] * N, workers)
        again.load_state_dict(state)
        assert len(flat(again)) == len(flat(rest)), epoch
        assert again.fingerprint() == loader.fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["numpy", "tensor"])
@pytest.mark.parametrize("batches", [0, 2, 5])
def test_a_rollover_of_ints_of_another_type(name, batches, workers):
    loader = made("rollover", [TYPES[name](index) for index in range(N)], workers)
    list(loader)
    state, rest = stopped(loader, batches)
    assert state["rest"] == [20, 21]
    third = list(loader)
    again = made("rollover", [TYPES[name](index) for index in range(N)], workers)
    again.load_state_dict(state)
    numbers = [[text.split()[-1] for text in batch] for batch in (*again, *again)]
    assert numbers == [[text.split()[-1] for text in batch] for batch in (*rest, *third)]


def test_a_rollover_of_what_is_no_int_is_an_error_where_the_state_is_asked_for():
    loader = made("rollover", [(index,) for index in range(N)])
    first = list(loader)
    iterator = iter(loader)
    assert next(iterator)[:2] == ["tuple (20,)", "tuple (21,)"]
    with pytest.raises(RuntimeError, match=r"keeps the index \(20,\) for the next epoch.*can have ints"):
        loader.state_dict()
    assert len(first) == 5 and len(list(iterator)) == 5


class Counted(torch.utils.data.Sampler):
    """Has a state, and draws."""

    def __init__(self):
        self.at = 0
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return N

    def __iter__(self):
        for self.at in range(self.at, N):  # noqa: B020
            self.at += 1
            yield int(torch.randint(1000, (), generator=self.generator))
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", range(7))
def test_a_rollover_over_a_sampler_with_a_state(batches, workers):
    def loader():
        return StatefulDataLoader(
            Made(anything, N),
            5,
            sampler=Counted(),
            last_batch="rollover",
            collate_fn=list,
            num_workers=workers,
        )

    whole = loader()
    epochs = [list(whole) for _ in range(5)]
    alone = ringloader.DataLoader(
        Made(anything, N), 5, sampler=Counted(), last_batch="rollover", collate_fn=list
    )
    assert epochs == [list(alone) for _ in range(5)]
    for epoch in range(4):
        first = loader()
        for _ in range(epoch):
            list(first)
        iterator = iter(first)
        taken = list(itertools.islice(iterator, batches))
        state = first.state_dict()
        again = loader()
        again.load_state_dict(json.loads(json.dumps(state)))
        if batches <= len(epochs[epoch]):
            assert [*taken, *again] == epochs[epoch]
        assert list(again) == epochs[epoch + 1]
