"""The draws of an epoch from the program's generator, which the program restores with the state."""

import itertools
import json
import os

import pytest
import torch
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from ringloader import StatefulDataLoader
from unit.test_state_moments import Interrupted, at_each_moment, is_of_loaders

pytestmark = pytest.mark.rings_only

N, SIZE = 100, 8
SAMPLERS = {
    "shuffle": lambda generator: RandomSampler(range(N), generator=generator),
    "several permutations": lambda generator: RandomSampler(
        range(N // 3), num_samples=N, generator=generator
    ),
    "replacement": lambda generator: RandomSampler(range(N), replacement=True, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(N), generator=generator),
    "weighted": lambda generator: WeightedRandomSampler([1.0] * N, N, generator=generator),
}
WAYS = {"none": {}, "two": {"num_workers": 2}}
STREAM = "iterable dataset"


def made(kind, has_generator, **options):
    generator = torch.default_generator if has_generator else None
    return StatefulDataLoader(
        range(N),
        SIZE,
        sampler=SAMPLERS[kind](generator),
        generator=generator,
        collate_fn=list,
        **options,
    )


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def taken(loader):
    """Returns the loader's state and that of the program's generator, as a checkpoint has both."""
    return json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()


def resumed(kind, has_generator, state, rng, **options):
    torch.manual_seed(99)
    loader = made(kind, has_generator, **options)
    loader.load_state_dict(state)
    torch.set_rng_state(rng)
    return loader


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_later_epochs_are_those_of_a_run_that_was_not_stopped(kind, has_generator, way):
    options = WAYS[way]
    torch.manual_seed(5)
    loader = made(kind, has_generator, **options)
    whole = [flat(loader) for _ in range(3)]
    for stop, then in [(1, 0), (1, 3), (5, 7), (12, 0), (12, 1), (13, 0)]:
        torch.manual_seed(5)
        loader = made(kind, has_generator, **options)
        seen = flat(itertools.islice(loader, stop))
        loader = resumed(kind, has_generator, *taken(loader), **options)
        if then:
            # The resumed epoch is stopped too.
            seen += flat(itertools.islice(loader, then))
            loader = resumed(kind, has_generator, *taken(loader), **options)
        assert [seen + flat(loader), flat(loader), flat(loader)] == whole, (stop, then)


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_signal_handler_finds_a_draw_made_and_recorded_or_neither(kind, has_generator):
    torch.manual_seed(5)
    loader = made(kind, has_generator)
    whole = [flat(loader) for _ in range(2)]
    torch.manual_seed(5)
    loader = made(kind, has_generator)
    iterator, seen, asked = iter(loader), [], []

    def ask():
        asked.append((len(seen), *taken(loader)))

    for number in itertools.count():
        with at_each_moment(ask, is_of_loaders):
            batch = next(iterator, None)
        if batch is None:
            break
        seen += batch
        assert number < N
    distinct = {(many, repr(state), bytes(rng.numpy())): (many, state, rng) for many, state, rng in asked}
    assert len(distinct) > N // SIZE
    for many, state, rng in distinct.values():
        again = resumed(kind, has_generator, state, rng)
        epochs = [flat(again) for _ in range(2)]
        assert [seen[:many] + epochs[0], epochs[1]] == whole or (
            state["_iterator_finished"] and epochs[0] == whole[1]
        )


def test_a_state_without_the_number_of_draws():
    """The first dicts of version 1 had none."""
    torch.manual_seed(5)
    loader = made("several permutations", True)
    iterator = iter(loader)
    next(iterator)
    state, _ = taken(loader)
    del state["draws"]
    again = made("several permutations", True)
    again.load_state_dict(state)
    assert flat(again) == flat(iterator)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, N, step))


def with_seed(samples):
    """Returns a batch that has the seed of the process that makes it, which follows from the base seed."""
    return [(index, torch.initial_seed()) for index in samples]


def made_with_seeds(kind, **options):
    if kind == STREAM:
        return StatefulDataLoader(Stream(), SIZE, collate_fn=with_seed, **options)
    return StatefulDataLoader(range(N), SIZE, sampler=SAMPLERS[kind](None), collate_fn=with_seed, **options)


def resumed_with_seeds(kind, state, rng, **options):
    torch.manual_seed(99)
    loader = made_with_seeds(kind, **options)
    loader.load_state_dict(state)
    torch.set_rng_state(rng)
    return loader


OF_ITER = {**WAYS, "persistent": {"num_workers": 2, "persistent_workers": True}}
COUNTED = {"none": {"seeding": "batch"}, "two": {"num_workers": 2, "seeding": "epoch"}}


@pytest.mark.parametrize("way", OF_ITER)
@pytest.mark.parametrize("kind", ["shuffle", "weighted", STREAM])
def test_a_signal_handler_finds_the_draws_of_iter_made_and_recorded_or_neither(kind, way):
    options = OF_ITER[way]
    torch.manual_seed(5)
    loader = made_with_seeds(kind, **options)
    whole = [flat(loader) for _ in range(3)]
    torch.manual_seed(5)
    loader, distinct = made_with_seeds(kind, **options), {}
    for epoch in range(2):

        def ask(epoch=epoch):
            state, rng = taken(loader)
            distinct[epoch, repr(state), bytes(rng.numpy())] = (epoch, state, rng)

        with at_each_moment(ask, is_of_loaders):
            iterator = iter(loader)
        assert flat(iterator) == whole[epoch]
    # Before the base seed is drawn, and after that, in each epoch.
    assert len(distinct) >= 4 - (way == "persistent" and kind == STREAM)
    for epoch, state, rng in distinct.values():
        again = resumed_with_seeds(kind, state, rng, **options)
        assert [flat(again) for _ in range(3 - epoch)] == whole[epoch:]


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize("kind", ["shuffle", STREAM])
def test_a_signal_handler_finds_the_number_of_the_epoch(kind, way):
    loader, found = made_with_seeds(kind, **COUNTED[way]), set()
    for epoch in range(3):

        def ask(epoch=epoch):
            state, _ = taken(loader)
            found.add((epoch, state["number"] + state["_iterator_finished"]))

        with at_each_moment(ask, is_of_loaders):
            iterator = iter(loader)
        flat(iterator)
    assert found == {(0, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("way", OF_ITER)
@pytest.mark.parametrize("kind", ["shuffle", STREAM])
@pytest.mark.parametrize("epochs", [0, 1])
def test_an_interrupted_iter_is_no_epoch(kind, way, epochs):
    """The program begins the epoch anew, or another run goes on in its place: both draw the same."""
    options, process = OF_ITER[way], os.getpid()
    torch.manual_seed(5)
    loader = made_with_seeds(kind, **options)
    whole = [flat(loader) for _ in range(epochs + 2)]
    # All moments would take long.
    for place in itertools.count(0, 7 if way == "none" else 61):
        torch.manual_seed(5)
        loader = made_with_seeds(kind, **options)
        for _ in range(epochs):
            flat(loader)
        left = itertools.count(place, -1)

        def interrupt(left=left):
            if os.getpid() == process and next(left) == 0:
                raise Interrupted

        try:
            with at_each_moment(interrupt, is_of_loaders):
                _kept = iter(loader)
            break
        except Interrupted:
            state, rng = taken(loader)
        if state["base_seed"] is None or state["_iterator_finished"]:
            later = [flat(loader), flat(loader)]
        else:
            # It came after the beginning.
            later = whole[epochs:]
        loader.shutdown()
        again = resumed_with_seeds(kind, state, rng, **options)
        assert [flat(again), flat(again)] == later, place
    assert place > 1
