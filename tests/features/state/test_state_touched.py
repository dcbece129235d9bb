"""A ``StatefulDataLoader`` keeps, and asks the program's objects for, what torch's loader does."""

import weakref

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

import ringloader

pytestmark = pytest.mark.rings_only

BOTH = [torch.utils.data.DataLoader, ringloader.StatefulDataLoader]
N = 7
WORKERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


class Order(Sampler):
    """Its iterators count how often they are asked for themselves."""

    def __init__(self):
        self.made = []
        self.asked = 0

    def __iter__(self):
        iterator = Indices(self)
        self.made.append(weakref.ref(iterator))
        return iterator

    def __len__(self):
        return N


class Indices:
    def __init__(self, order):
        self.order = order
        self.rest = iter(range(N))

    def __iter__(self):
        self.order.asked += 1
        return self

    def __next__(self):
        return next(self.rest)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_iterator_does_not_keep_the_generator_of_a_loader_that_is_gone(workers):
    for cls in BOTH:
        generator = torch.Generator()
        gone = weakref.ref(generator)
        loader = cls(list(range(N)), generator=generator, **workers)
        iterator = iter(loader)
        next(iterator)
        del loader, generator
        assert gone() is None, cls
        del iterator


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", WORKERS[:2])
def test_the_iterator_of_a_sampler_is_asked_for_itself_as_often(workers, drop_last):
    asked = []
    for cls in BOTH:
        order = Order()
        batches = list(cls(list(range(N)), 2, sampler=order, drop_last=drop_last, **workers))
        asked.append((len(batches), order.asked))
    assert asked[0] == asked[1]


@pytest.mark.parametrize("batch_size", [3, N + 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_iterator_of_a_sampler_goes_in_the_call_that_finds_its_end(batch_size, drop_last):
    left = []
    for cls in BOTH:
        order = Order()
        iterator = iter(cls(list(range(N)), batch_size, sampler=order, drop_last=drop_last))
        alive = []
        while True:
            try:
                next(iterator)
            except StopIteration:
                # The frames of that call still are there.
                alive.append(order.made[0]() is not None)
                break
            alive.append(order.made[0]() is not None)
        left.append(alive)
    assert left[0] == left[1]


class Counting(Dataset):
    """Has a state: where it begins, and how many samples it has made since."""

    def __init__(self, at):
        self.at = at

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.at += 1
        return index, self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Unasked(Counting):
    def state_dict(self):
        raise AssertionError("nobody asked for it")


@pytest.mark.parametrize("workers", WORKERS)
def test_the_state_before_the_first_epoch_has_none_of_the_dataset(workers):
    """That of torchdata's loader has one, for which it starts the workers."""
    state = ringloader.StatefulDataLoader(Unasked(50), **workers).state_dict()
    loader = ringloader.StatefulDataLoader(Counting(7), collate_fn=list, **workers)
    loader.load_state_dict(state)
    assert list(loader) == [[(index, 8 + index)] for index in range(N)]
