"""torch's samplers read natively: the same indices, and the generators in the same state after each."""

import random

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

from ringloader import _samplers

CASES_PER_KIND = 150


def random_case(kind, rng):
    n = rng.choice([1, 2, 3, 5, 31, 32, 33, 64, 100])
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
    if kind in ("sequential", "distributed") or rng.random() < 0.7:
        sampler = BatchSampler(sampler, rng.choice([1, 2, 3, 7, 32, 50]), rng.random() < 0.5)
    return sampler, generator


def outcomes(advance, generator, seed, requests):
    """What each request brings, and both generators' states after it."""
    torch.manual_seed(seed)
    if generator is not None:
        generator.manual_seed(seed + 1)
    found = []
    for _ in range(requests):
        try:
            value = advance()
        except StopIteration:
            value = "end"
        state = torch.get_rng_state().numpy().tobytes()
        own = generator.get_state().numpy().tobytes() if generator is not None else b""
        found.append((value, state, own))
        if value == "end" and len(found) > 1 and found[-2][0] == "end":
            break
    return found


@pytest.mark.parametrize(
    "kind", ["sequential", "random", "replacement", "subset", "weighted", "distributed", "nones"]
)
def test_a_stream_is_torchs_sampler(kind):
    rng = random.Random(kind)
    ended = 0
    for seed in range(CASES_PER_KIND):
        sampler, generator = random_case(kind, rng)
        stream = _samplers.stream_of(sampler)
        assert stream is not None, f"{kind} {seed} is not read natively"

        def native(stream=stream):
            index = (stream.native or stream.open()).next(stream)
            if index is None and kind != "nones":
                raise StopIteration
            return index

        requests = rng.choice([3, 200])
        expected = outcomes(iter(sampler).__next__, generator, seed, requests)
        actual = outcomes(native, generator, seed, requests)
        assert actual == expected, f"{kind} {seed}"
        ended += expected[-1][0] == "end"
        assert all(
            type(index) is int for value, *_ in actual if isinstance(value, list) for index in value if index
        )
    assert kind == "nones" or ended > CASES_PER_KIND // 4, "hardly an epoch came to its end"


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
        SubsetRandomSampler(["a", "b"]),
        SubsetRandomSampler([True, 2]),
        SequentialSampler(range(3)),
    ],
    ids=repr,
)
def test_other_samplers_are_iterated_in_python(sampler):
    assert _samplers.stream_of(sampler) is None


def test_a_replaced_iter_takes_effect(monkeypatch):
    sampler = BatchSampler(RandomSampler(range(9)), 2, False)
    assert _samplers.stream_of(sampler) is not None
    monkeypatch.setattr(RandomSampler, "__iter__", lambda _self: iter([1, 2]))
    assert _samplers.stream_of(sampler) is None


def test_an_empty_source_divides_by_zero_as_torchs_does():
    source = [1]
    sampler = BatchSampler(RandomSampler(source), 2, False)
    source.clear()
    stream = _samplers.stream_of(sampler)
    with pytest.raises(ZeroDivisionError):
        next(iter(sampler))
    with pytest.raises(ZeroDivisionError):
        stream.open().next(stream)
