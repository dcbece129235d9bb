"""torch's samplers read natively: the same indices, and the generators in the same state after each."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from ringloader._sources import samplers

CASES_PER_KIND = 250
SIZES = [1, 2, 3, 5, 31, 32, 33, 64, 100, 257]
# Around the sizes at which torch's or our way of drawing may change, even and odd.
LARGE = [65_534, 65_535, 65_536, 65_537, 65_538, 131_071, 131_072, 131_073, 200_001, 300_000]


def random_case(kind, rng, sizes=SIZES, batched=0.7, batch_sizes=(1, 2, 3, 7, 32, 50)):
    n = rng.choice(sizes)
    generator = torch.Generator() if rng.random() < 0.5 else None
    if kind == "sequential":
        sampler = SequentialSampler(range(n))
    elif kind == "random":
        count = rng.choice([None, 1, n, n + 1, 2 * n, 2 * n + 1, 7, 64])
        sampler = RandomSampler(range(n), num_samples=count, generator=generator)
    elif kind == "replacement":
        count = rng.choice([None, 1, 31, 32, 33, 64, 65, 100])
        sampler = RandomSampler(range(n), replacement=True, num_samples=count, generator=generator)
    elif kind == "subset":
        indices = rng.choice([list(range(n)), range(0, 3 * n, 3), [5] * n, []])
        sampler = SubsetRandomSampler(indices, generator)
    elif kind == "weighted":
        replacement = rng.random() < 0.5
        count = rng.randint(1, n) if not replacement else rng.randint(1, 70)
        sampler = WeightedRandomSampler(torch.rand(n) + 0.1, count, replacement, generator)
    elif kind == "distributed":
        replicas = rng.randint(1, 7)
        sampler = DistributedSampler(
            range(n),
            replicas,
            rng.randrange(replicas),
            shuffle=rng.random() < 0.5,
            seed=rng.randint(0, 9),
            drop_last=rng.random() < 0.5 and n >= replicas,
        )
        sampler.set_epoch(rng.randint(0, 3))
    else:
        sampler = _InfiniteConstantSampler()
    if kind in ("sequential", "distributed") or rng.random() < batched:
        sampler = BatchSampler(sampler, rng.choice(batch_sizes), rng.random() < 0.5)
    return sampler, generator


def outcomes(advance, generator, seed, requests):
    """Returns what each request brings, and both generators' states after it.

    Now and then other code draws from them in between.
    """
    torch.manual_seed(seed)
    if generator is not None:
        generator.manual_seed(seed + 1)
    others = random.Random(seed)
    found = []
    for _ in range(requests):
        try:
            value = advance()
        except StopIteration:
            value = "end"
        found.append((value, state_of(torch.default_generator), state_of(generator)))
        if value == "end" and len(found) > 1 and found[-2][0] == "end":
            break
        if others.random() < 0.05:
            torch.rand(others.randint(1, 3), generator=others.choice([None, generator]))
    return found


def state_of(generator):
    return None if generator is None else hash(generator.get_state().numpy().tobytes())


def native_advance(sampler, kind):
    draws = samplers.draws_of(sampler)
    assert draws is not None, f"{sampler!r} is not read natively"
    # Made at the first request, as `IndexSource` does; anew after `len` has raised.
    opened = []

    def advance():
        if not opened:
            opened.append(draws.open())
        index = opened[0].next(draws)
        if index is None and kind != "nones":
            raise StopIteration
        return index

    return advance


def assert_alike(sampler, generator, kind, seed, requests):
    """Returns whether the end was reached."""
    expected = outcomes(iter(sampler).__next__, generator, seed, requests)
    actual = outcomes(native_advance(sampler, kind), generator, seed, requests)
    for request, (theirs, ours) in enumerate(zip(expected, actual, strict=False)):
        assert ours == theirs, f"{kind} {seed}: request {request}"
    assert len(actual) == len(expected)
    flat = [index for value, *_ in actual for index in (value if isinstance(value, list) else [value])]
    assert all(type(index) is int for index in flat if index not in ("end", None))
    return expected[-1][0] == "end"


KINDS = ["sequential", "random", "replacement", "subset", "weighted", "distributed", "nones"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_torchs_sampler(kind):
    rng = random.Random(kind)
    ended = 0
    for seed in range(CASES_PER_KIND):
        sampler, generator = random_case(kind, rng)
        ended += assert_alike(
            sampler, generator, kind, seed, rng.choice([3, 30, 30 if kind == "nones" else 300])
        )
    assert kind == "nones" or ended > CASES_PER_KIND // 4, "hardly an epoch came to its end"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nones"])
def test_large_ones(kind):
    """In large batches to the end, and index by index at their beginning."""
    rng = random.Random(kind)
    for seed, n in enumerate(LARGE):
        sampler, generator = random_case(kind, rng, [n], 1.0, [1000, 4096, n // 2 + 1])
        assert_alike(sampler, generator, kind, seed, 400)
        sampler, generator = random_case(kind, rng, [n], 0.0, [1])
        assert_alike(sampler, generator, kind, seed, 100)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40, 65_537])
def test_ranks_go_on_where_others_stopped(n):
    """As torch's sampler over the rest, but padded from the epoch's first indices."""
    rng = random.Random(n)
    for _ in range(200 if n < 100 else 6):
        ranks, drop_last = rng.choice([1, 2, 3, 5, rng.randint(1, 60)]), rng.random() < 0.5
        start = rng.randint(0, n + 20)
        options = {"shuffle": rng.random() < 0.5, "drop_last": drop_last, "seed": 3}
        order = list(DistributedSampler(range(n), 1, 0, **options))
        left = n - min(start, n)
        many = left // ranks if drop_last else -(-left // ranks)
        for rank in {0, ranks - 1, rng.randrange(ranks)}:
            draws = samplers.draws_of(
                BatchSampler(DistributedSampler(range(n), ranks, rank, **options), 7, False)
            )
            draws.resumed = samplers.Resumed(start=start)
            stream = draws.open()
            found = [index for batch in iter(lambda: stream.next(draws), None) for index in batch]  # noqa: B023
            positions = (min(start, n) + rank + at * ranks for at in range(many))
            if start == 0:
                assert found == list(DistributedSampler(range(n), ranks, rank, **options))
            else:
                assert found == [order[position % n] for position in positions]


@pytest.mark.parametrize("name", ["rank", "num_samples"])
def test_a_distributed_sampler_with_a_negative_number_is_left_to_torch(name):
    sampler = BatchSampler(DistributedSampler(list(range(10)), 2, 1, shuffle=False, drop_last=True), 2, False)
    setattr(sampler.sampler, name, -1)
    assert samplers.draws_of(sampler).open() is None
    with pytest.raises(AssertionError):
        next(iter(sampler))


def test_a_distributed_sampler_over_another_length_is_left_to_torch():
    data = list(range(10))
    for drop_last in (False, True):
        sampler = BatchSampler(DistributedSampler(data, 3, 1, drop_last=drop_last), 2, False)
        assert samplers.draws_of(sampler).open() is not None
        sampler.sampler.num_samples = 4 if drop_last else 3
        draws = samplers.draws_of(sampler)
        assert draws.open() is None
        with pytest.raises(AssertionError):
            list(sampler)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("n", [65_536, 65_537])
def test_every_index_of_a_large_permutation(n, given):
    generator = torch.Generator() if given else None
    sampler = RandomSampler(range(n), num_samples=n + 5, generator=generator)
    assert assert_alike(sampler, generator, "random", 1, n + 10)


@pytest.mark.parametrize("kind", ["random", "replacement", "subset", "weighted"])
def test_two_that_share_a_generator(kind):
    """Each draws when it is its turn, also from a generator that the other has moved on."""
    rng = random.Random(kind)
    for seed in range(60):
        states = []
        first, generator = random_case(kind, rng)
        second, _ = random_case(kind, rng)
        inner = second.sampler if isinstance(second, BatchSampler) else second
        inner.generator = generator
        turns = [rng.randrange(2) for _ in range(60)]

        for make in (lambda sampler: iter(sampler).__next__, lambda sampler: native_advance(sampler, kind)):
            both = [make(first), make(second)]
            turn = iter(turns)
            states.append(outcomes(lambda both=both, turn=turn: either(both, turn), generator, seed, 60))
        assert states[0] == states[1], f"{kind} {seed}"


def either(both, turn):
    try:
        return both[next(turn)]()
    except StopIteration:
        return None


class Theirs(RandomSampler):
    pass


class Odd(Sampler):
    def __iter__(self):
        return iter([3, 1])


@pytest.mark.parametrize(
    "sampler",
    [
        Theirs(range(3)),
        Odd(),
        [1, 2],
        BatchSampler(Odd(), 2, False),
        BatchSampler([1, 2], 2, False),
        SubsetRandomSampler(torch.arange(3)),
        SubsetRandomSampler((1, 2)),
        SequentialSampler(range(3)),
    ],
)
def test_other_samplers_are_iterated_in_python(sampler):
    assert samplers.draws_of(sampler) is None


def test_a_replaced_iter_takes_effect(monkeypatch):
    sampler = BatchSampler(RandomSampler(range(9)), 2, False)
    assert samplers.draws_of(sampler) is not None
    monkeypatch.setattr(RandomSampler, "__iter__", lambda _self: iter([1, 2]))
    assert samplers.draws_of(sampler) is None


def test_an_empty_source_divides_by_zero_as_torchs_does():
    source = [1]
    sampler = BatchSampler(RandomSampler(source), 2, False)
    source.clear()
    draws = samplers.draws_of(sampler)
    with pytest.raises(ZeroDivisionError):
        next(iter(sampler))
    with pytest.raises(ZeroDivisionError):
        draws.open().next(draws)


@pytest.mark.parametrize(
    "indices",
    [[2**63, 1], [-(2**63) - 1], [2**63 - 1, -(2**63), 5], ["a", "b"], [True, 2], [1.0, 2], [None]],
    ids=str,
)
def test_indices_reach_the_dataset_as_they_are(indices):
    theirs = list(SubsetRandomSampler(indices, torch.Generator().manual_seed(3)))
    for batch_size in (None, 1, 2):
        sampler = SubsetRandomSampler(indices, torch.Generator().manual_seed(3))
        if batch_size is not None:
            sampler = BatchSampler(sampler, batch_size, False)
        draws = samplers.draws_of(sampler)
        native = draws.open()
        found = [native.next(draws) for _ in range(-(-len(indices) // (batch_size or 1)))]
        flat = found if batch_size is None else list(itertools.chain(*found))
        assert [(type(index), index) for index in flat] == [(type(index), index) for index in theirs]


def change_entries(sampler):
    sampler.sampler.indices[:] = range(100, 120)


def change_indices(sampler):
    sampler.sampler.indices = range(200, 220)


def cut_indices(sampler):
    del sampler.sampler.indices[5:]


CHANGES = {
    "entries": change_entries,
    "indices": change_indices,
    "fewer indices": cut_indices,
    **{
        f"size {size!r}": (lambda sampler, size=size: setattr(sampler, "batch_size", size))
        for size in (1, 5, 100, np.int64(4), True, 0, None, -1, 2.0, "two", 2**63)
    },
    "drop_last": lambda sampler: setattr(sampler, "drop_last", not sampler.drop_last),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sampler_is_changed_while_it_is_read(change, drop_last):
    """torch looks at the subset's indices one by one, and at the size of a batch before each."""
    both = []
    for native in (False, True):
        subset = SubsetRandomSampler(list(range(20)), torch.Generator().manual_seed(3))
        sampler = BatchSampler(subset, 3, drop_last)
        advance = native_advance(sampler, "subset") if native else iter(sampler).__next__
        found = [advance(), advance()]
        CHANGES[change](sampler)
        for _ in range(20):
            try:
                found.append(advance())
            except Exception as error:
                found.append((type(error), str(error)))
        both.append(found)
    assert both[1] == both[0]
