"""The draws of an epoch from the program's generator, which the program restores with the state."""

import itertools
import json

import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ringloader import StatefulDataLoader

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
