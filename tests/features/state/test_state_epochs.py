"""The number and the generators of a resumed epoch and of those after it."""

import itertools
import json
import random

import pytest
import torch
from torch.utils.data import (
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ringloader import StatefulDataLoader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

N = 24


class Drawing(Dataset):
    """Gives the epoch that ``worker_reset_fn`` was told, and a random number."""

    epoch = None

    def __len__(self):
        return N

    def __getitem__(self, index):
        return int(index), self.epoch, random.random()


def reset(dataset, _info, seeds):
    dataset.epoch = seeds.epoch


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def through_json(loader):
    return json.loads(json.dumps(loader.state_dict()))


WAYS = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 1, "worker_method": "thread", "persistent_workers": True},
}


@pytest.mark.parametrize("stop_in", [0, 2])
@pytest.mark.parametrize("batches", [0, 2, None])
@pytest.mark.parametrize("way", WAYS)
def test_seeds_count_the_resumed_epoch_and_the_next_ones(way, batches, stop_in):
    def made():
        return StatefulDataLoader(
            Drawing(), 4, collate_fn=list, worker_reset_fn=reset, seed=3, shuffle=True, **WAYS[way]
        )

    first = made()
    for _ in range(stop_in):
        flat(first)
    iterator = iter(first)
    taken = flat(itertools.islice(iterator, batches))
    assert {epoch for _, epoch, _ in taken} <= {stop_in}
    again = made()
    again.load_state_dict(through_json(first))
    begins_next = batches is None
    for epoch in range(stop_in + begins_next, stop_in + 3):
        assert {told for _, told, _ in flat(again)} == {epoch}


class Wrapper(Sampler):
    """Around another sampler, as frameworks put it."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        return iter(self.sampler)


class WithEpoch(Sampler):
    """Shuffles by its epoch."""

    counts = False

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += self.counts
        return iter(order)


class Counting(WithEpoch):
    """Counts its epochs itself, where torch asks for its iterator."""

    counts = True


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("cls", [WithEpoch, Counting])
def test_seeding_goes_on_with_the_epoch_of_a_sampler_inside_others(cls, levels, way):
    def made():
        sampler = cls()
        given = sampler
        for _ in range(levels):
            given = Wrapper(given)
        loader = StatefulDataLoader(
            Drawing(), 4, sampler=given, collate_fn=list, seeding="sample", seed=3, **WAYS[way]
        )
        return loader, sampler

    whole, sampler = made()
    epochs = []
    for epoch in range(3):
        if cls is WithEpoch:
            sampler.set_epoch(epoch)
        epochs.append(flat(whole))
    # Each epoch has seeds of its own.
    assert len({draw for epoch in epochs for _, _, draw in epoch}) == 3 * N
    first, sampler = made()
    if cls is WithEpoch:
        sampler.set_epoch(1)
    else:
        flat(first)
    iterator = iter(first)
    taken = flat(itertools.islice(iterator, 2))
    again, sampler = made()
    again.load_state_dict(through_json(first))
    assert taken + flat(again) == epochs[1]
    if cls is WithEpoch:
        sampler.set_epoch(2)
    assert flat(again) == epochs[2]


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda _, generator: {"shuffle": True, "generator": generator},
        lambda data, generator: {"sampler": RandomSampler(data, generator=generator)},
        lambda _, generator: {"sampler": SubsetRandomSampler(range(N), generator=generator)},
        lambda _, generator: {"sampler": WeightedRandomSampler([1.0] * N, N, generator=generator)},
    ],
)
def test_the_programs_generator_passed_as_generator(sampler, way):
    def made():
        data = list(range(N))
        return StatefulDataLoader(data, 4, **sampler(data, torch.default_generator), **WAYS[way])

    torch.manual_seed(5)
    first = made()
    iterator = iter(first)
    taken = torch.cat(list(itertools.islice(iterator, 2))).tolist()
    state = through_json(first)
    rest = torch.cat(list(iterator)).tolist()
    torch.manual_seed(6)
    again = made()
    again.load_state_dict(state)
    assert torch.cat(list(again)).tolist() == rest
    assert len(taken + rest) == N


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
def test_set_epoch_between_load_and_iter_does_not_count_for_the_rest(way):
    def made():
        sampler = WithEpoch()
        return StatefulDataLoader(list(range(N)), 4, sampler=sampler, **WAYS[way]), sampler

    def numbers(batches):
        return torch.cat(list(batches)).tolist()

    def order(epoch):
        return torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()

    first, sampler = made()
    sampler.set_epoch(2)
    taken = numbers(itertools.islice(iter(first), 2))
    again, sampler = made()
    again.load_state_dict(first.state_dict())
    sampler.set_epoch(7)
    assert taken + numbers(again) == order(2)
    # The program names each epoch.
    sampler.set_epoch(8)
    assert numbers(again) == order(8)


class Reading(Dataset):
    """Counts its reads, as its state."""

    reads = 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.reads += 1
        return index

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_map_style_dataset_with_a_state_goes_on_in_other_batches(size, every):
    def made(size):
        return StatefulDataLoader(Reading(), size, num_workers=1, snapshot_every_n_steps=every)

    for batches in range(5):
        first = made(4)
        iterator = iter(first)
        taken = flat(batch.tolist() for batch in itertools.islice(iterator, batches))
        state = first.state_dict()
        again = made(size)
        again.load_state_dict(state)
        assert taken + flat(batch.tolist() for batch in again) == list(range(N))
        assert state["workers"]["parts"][0].get("dataset", {"reads": 0}) == {"reads": 4 * batches}
