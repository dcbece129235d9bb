"""``seeding=``: the numbers of an epoch, of a rank, and of an epoch that goes on from a state."""

import itertools
import json

import pytest
import torch
from seeding_parts import SEED, WAYS, Drawing, Following, N, Stream, expected, flat, key_of, made, samples
from torch.utils.data.distributed import DistributedSampler

from ringloader import StatefulDataLoader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.parametrize("way", ["none", "two", "persistent", "threads"])
def test_which_epoch_it_is(way):
    """Epochs are counted, or named by ``set_epoch``, as for ``Seeds``."""
    is_thread = way == "threads"
    loader = made(**WAYS[way])
    assert flat(loader) == samples(range(N), 0, is_thread=is_thread)
    next(iter(loader))
    assert flat(loader) == samples(range(N), 2, is_thread=is_thread)
    loader.set_epoch(7)
    assert flat(loader) == samples(range(N), 7, is_thread=is_thread)
    assert flat(loader) == samples(range(N), 8, is_thread=is_thread)


def note(_dataset, _info, seeds):
    return [(seeds.epoch, *one) for one in [(0,), (1,)]]


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
def test_each_epoch_is_counted_once(way):
    """``worker_reset_fn`` has the epochs of seeding."""
    loader = made([0, 1], worker_reset_fn=note, batch_size=None, collate_fn=None, **WAYS[way])
    assert [[epoch for epoch, _ in loader] for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


class WithEpoch(list):
    """A sampler that counts epochs in its own way."""

    epoch = 40

    def set_epoch(self, epoch):
        self.epoch = 10 * epoch


@pytest.mark.parametrize("way", ["none", "two", "persistent"])
def test_the_epoch_of_a_sampler_that_has_one(way):
    sampler = WithEpoch(range(N))
    loader = made(sampler=sampler, **WAYS[way])
    assert flat(loader) == samples(range(N), 40)
    assert flat(loader) == samples(range(N), 40)
    loader.set_epoch(3)
    assert flat(loader) == samples(range(N), 30)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_ranks_are_those_of_one(workers, drop_last):
    def rank(number, ranks, **options):
        sampler = DistributedSampler(Drawing(24), ranks, number, seed=5, drop_last=drop_last)
        sampler.set_epoch(3)
        return flat(made(Drawing(24), sampler=sampler, num_workers=workers, **options))

    whole = rank(0, 1)
    assert whole == samples([sample[0] for sample in whole], epoch=3)
    for ranks in (2, 3):
        for size in (1, 4):
            parts = [rank(number, ranks, batch_size=size) for number in range(ranks)]
            assert [sample for together in zip(*parts, strict=True) for sample in together] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_other_samplers_have_keys_for_each_rank(workers, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert flat(made(num_workers=workers)) == samples(range(N), rank=1)
    got = flat(made(Stream(5), num_workers=workers, batch_size=5))[:5]
    assert [sample[2:] for sample in got] == [expected(key_of(SEED, 0, 1, 0, place))[0] for place in range(5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_it_is_torchs_base_seed(workers):
    def got(generator=None):
        iterator = iter(made(seed=None, num_workers=workers, generator=generator))
        return iterator._base_seed, flat(iterator)

    torch.manual_seed(8)
    base_seed, found = got()
    assert found == [(index, *expected(key_of(base_seed, 0, 0, 0, index))[0]) for index in range(N)]
    torch.manual_seed(8)
    assert got() == (base_seed, found)
    assert (
        got(torch.Generator().manual_seed(2)) == got(torch.Generator().manual_seed(2)) != (base_seed, found)
    )


@pytest.mark.parametrize("way", ["none", "two", "threads"])
@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize(
    "later", [{}, {"num_workers": 2}, {"batch_size": 7}, {"num_workers": 2, "batch_size": 3}]
)
def test_a_resumed_epoch_goes_on_with_the_places_of_its_samples(way, seed, later):
    later = {"worker_method": "thread", "num_workers": 2, **later} if way == "threads" else later

    def loader(**options):
        generator = torch.Generator().manual_seed(6)
        return made(cls=StatefulDataLoader, seed=seed, shuffle=True, generator=generator, **options)

    whole = loader(**WAYS[way])
    torch.manual_seed(4)
    epochs = [flat(whole) for _ in range(3)]
    torch.manual_seed(4)
    stopped = loader(**WAYS[way])
    assert flat(stopped) == epochs[0]
    iterator = iter(stopped)
    got = flat(itertools.islice(iterator, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = loader(**later)
    resumed.load_state_dict(state)
    assert got + flat(resumed) == epochs[1]
    assert flat(resumed) == epochs[2]


@pytest.mark.parametrize("seeding", ["sample", "batch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_are_read_again_are_no_batches_to_collate_fn(workers, seeding):
    def loader():
        options = {"collate_fn": Following(), "num_workers": workers, "seeding": seeding, "seed": SEED}
        return StatefulDataLoader(Stream(), 3, **options)

    whole = list(loader())
    stopped = loader()
    iterator = iter(stopped)
    begun = [next(iterator) for _ in range(2)]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert len(whole) > 2
    assert begun + list(resumed) == whole


@pytest.mark.parametrize("batches", [1, 6, None])
def test_a_state_that_other_code_has_edited_or_at_the_end(batches):
    whole = made()
    epochs = [flat(whole) for _ in range(2)]
    loader = made(cls=StatefulDataLoader)
    iterator = iter(loader)
    list(iterator) if batches is None else list(itertools.islice(iterator, batches))
    state = loader.state_dict()
    if batches == 1:
        state["_num_yielded"] = batches = 4
    resumed = made(cls=StatefulDataLoader, num_workers=2)
    resumed.load_state_dict(state)
    rest = flat(resumed)
    assert rest == (epochs[1] if batches is None else epochs[0][4 * batches :])
    if batches is not None:
        assert flat(resumed) == epochs[1]


def test_a_resumed_epoch_of_ranks():
    def loader(epoch, **options):
        sampler = DistributedSampler(Drawing(), 2, 1, seed=5)
        sampler.set_epoch(epoch)
        return made(cls=StatefulDataLoader, sampler=sampler, **options)

    whole = flat(loader(3))
    stopped = loader(3)
    iterator = iter(stopped)
    got = next(iterator)
    resumed = loader(0, num_workers=2)
    resumed.load_state_dict(stopped.state_dict())
    resumed.sampler.set_epoch(9)
    assert got + flat(resumed) == whole
