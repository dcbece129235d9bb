"""``state_dict`` over samplers that stand around others, as accelerate and Lightning make them."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

import ringloader
from features.state.test_state import Numbers, flat, seeded, through_json

N = 23


class Shard(Sampler):
    """Gives one rank every so-manyth batch of another sampler, as accelerate's BatchSamplerShard."""

    def __init__(self, batch_sampler, process_index=0, num_processes=1):
        self.batch_sampler = batch_sampler
        self.process_index, self.num_processes = process_index, num_processes

    def __iter__(self):
        return itertools.islice(self.batch_sampler, self.process_index, None, self.num_processes)

    def __len__(self):
        return len(range(self.process_index, len(self.batch_sampler), self.num_processes))


class Counting(Sampler):
    """Shuffles by its epoch, and counts it on when one ends, as accelerate's SeedableRandomSampler."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        yield from torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.epoch = epoch


def sharded(rank=0, ranks=1, seed=3, **options):
    inner = RandomSampler(range(N), generator=seeded(seed))
    batches = Shard(BatchSampler(inner, 4, False), rank, ranks)
    return ringloader.StatefulDataLoader(Numbers(), batch_sampler=batches, collate_fn=list, **options)


def counting(nested, **options):
    batches = BatchSampler(Counting(), 4, False)
    return ringloader.StatefulDataLoader(
        Numbers(), batch_sampler=Shard(batches) if nested else batches, collate_fn=list, **options
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("passed", [0, 2, 6, 7])
def test_the_generator_of_a_sampler_inside_is_in_the_state(workers, before, passed):
    loader = sharded(num_workers=workers)
    for _ in range(before):
        list(loader)
    iterator = iter(loader)
    # The seventh is the end.
    list(itertools.islice(iterator, passed))
    state = through_json(loader.state_dict())
    rest = list(iterator) if passed < 7 else []
    later = [list(loader) for _ in range(2)]
    assert later[0] != later[1]
    resumed = sharded(num_workers=2 - workers, seed=99)
    resumed.load_state_dict(state)
    if passed < 7:
        assert list(resumed) == rest
    assert [list(resumed) for _ in range(2)] == later


@pytest.mark.parametrize("nested", [False, True])
def test_the_epoch_of_a_sampler_inside_is_set(nested, caplog):
    loader = counting(nested)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["epoch"] == 1
    rest = list(iterator)
    after = list(loader)
    resumed = counting(nested)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(resumed) == rest
    assert list(resumed) == after
    # Another epoch of the program's does not count for the rest.
    resumed = counting(nested)
    resumed.load_state_dict(state)
    other = 7 + nested
    resumed.set_epoch(other)
    if nested:
        resumed.batch_sampler.batch_sampler.sampler.set_epoch(other)
    assert list(resumed) == rest
    assert f"set_epoch({other}) does not count for it" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_distributed_sampler_has_the_epoch_that_resumes(workers):
    def made(epoch):
        sampler = DistributedSampler(range(N), num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        return ringloader.StatefulDataLoader(
            Numbers(), batch_size=4, sampler=sampler, collate_fn=list, num_workers=workers
        )

    loader = made(3)
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), list(iterator)
    resumed = made(0)
    resumed.load_state_dict(state)
    # Does not count for the rest.
    resumed.sampler.set_epoch(9)
    assert list(resumed) == rest
    assert resumed.sampler.epoch == 3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("named", [None, 5])
def test_behind_an_epoch_that_is_over_comes_the_next(nested, named):
    loader = counting(nested)
    list(loader)
    list(loader)
    state = loader.state_dict()
    assert state["_iterator_finished"]
    resumed = counting(nested)
    resumed.load_state_dict(state)
    inner = resumed.batch_sampler.batch_sampler.sampler if nested else resumed.batch_sampler.sampler
    if named is not None:
        inner.set_epoch(named)
    epoch = 2 if named is None else named
    expected = torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()
    assert flat(resumed) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_any_ranks_state_serves_all(workers):
    loaders = [sharded(rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        list(itertools.islice(iterator, 2))
    states = [through_json(loader.state_dict()) for loader in loaders]
    rests = [list(iterator) for iterator in iterators]
    assert rests[0] != rests[1]
    later = [list(loader) for loader in loaders]
    for state in states:
        for rank in range(2):
            resumed = sharded(rank, 2, num_workers=workers, seed=99)
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            first = next(iterator)
            # Its states are those of its own rank.
            assert resumed.state_dict()["rank"] == rank
            assert [first, *iterator] == rests[rank]
            assert list(resumed) == later[rank]


def test_another_number_of_ranks_divides_the_epoch_otherwise():
    loader = sharded(0, 2)
    next(iter(loader))
    state = loader.state_dict()
    resumed = sharded(0, 3)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"taken with 2 ranks, and there are 3 now: over a Shard"):
        iter(resumed)
    # An epoch that is over is not divided.
    list(loader)
    resumed = sharded(0, 3)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 2


def test_other_data_of_the_same_rank_is_refused():
    loader = sharded(0, 2)
    next(iter(loader))
    state = loader.state_dict()
    state["inner_generator"] = sharded(seed=99).state_dict()["inner_generator"]
    resumed = sharded(0, 2)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="are not those that the Shard gives now"):
        next(iter(resumed))
