"""Generators of the program are as they were after samples that ``seeding=`` has set them for."""

import random
import sys
import time

import numpy as np
import pytest
import torch
from seeding_parts import SEED, WAYS, Drawing, Several, Stream, drawn, expected, flat, key_of, made, samples
from torch.utils.data import (
    IterableDataset,
)

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


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
