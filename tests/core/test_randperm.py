"""Large permutations, made while they are read: torch's own indices, and generators as torch leaves them."""

import functools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from ringloader._sources import randperm
from ringloader._sources.samplers import draws_of


def samplers(n, generator):
    return {
        "random": RandomSampler(range(n), generator=generator),
        "more than all": RandomSampler(range(n), num_samples=2 * n + 77, generator=generator),
        "subset": SubsetRandomSampler(list(range(0, 3 * n, 3)), generator),
        "distributed": DistributedSampler(range(n), 3, 2, shuffle=True, seed=5),
    }


def read(sampler, batch_size, generator, native, monkeypatch):
    """Every batch, with the states of both generators after it."""
    torch.manual_seed(3)
    if generator is not None:
        generator.manual_seed(7)
    batches = BatchSampler(sampler, batch_size, False)
    if native:
        monkeypatch.setattr(torch, "randperm", None)
        monkeypatch.setattr(randperm, "_randperm", None)
        draws = draws_of(batches)
        advance = functools.partial(draws.open().next, draws)
    else:
        advance = functools.partial(next, iter(batches), None)
    found = []
    while (batch := advance()) is not None:
        own = generator.get_state().numpy().tobytes() if generator is not None else b""
        found.append((batch, torch.get_rng_state().numpy().tobytes(), own))
    return found


@pytest.mark.parametrize("kind", samplers(3, None))
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("n", [65_536, 65_537, 140_001])
def test_equal_to_torchs(kind, own_generator, n, monkeypatch):
    assert randperm.can(n)
    for batch_size in (1000, 70_000):
        generator = torch.Generator() if own_generator else None
        sampler = samplers(n, generator)[kind]
        expected = read(sampler, batch_size, generator, False, monkeypatch)
        with monkeypatch.context() as patched:
            # Nobody draws the permutation as a whole.
            found = read(sampler, batch_size, generator, True, patched)
        assert len(expected) > 0 and found == expected


def test_generator_may_be_used_meanwhile():
    """Torch draws everything at the first index: later draws and seeds do not change the order."""
    generator = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(70_000), generator=generator)
    expected = list(sampler)
    generator.manual_seed(1)
    draws = draws_of(sampler)
    native = draws.open()
    found = []
    for number in range(70_000):
        found.append(native.next(draws))
        if number % 1000 == 0:
            generator.manual_seed(number)
    assert found == expected


def test_small_ones_are_drawn_as_a_whole():
    assert not randperm.can(65_535)
    assert randperm.can(65_536)
    assert not randperm.can((2**32 - 1) // 20)


def test_a_replaced_function_takes_effect(monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    draws = draws_of(RandomSampler(range(70_000)))
    assert draws.open().next(draws) == 0


def test_a_mode_takes_effect():
    class Backwards(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return torch.arange(len(result) - 1, -1, -1) if function is torch.randperm else result

    draws = draws_of(RandomSampler(range(70_000)))
    with Backwards():
        assert draws.open().next(draws) == 69_999


def test_another_algorithm_is_noticed(monkeypatch):
    """A torch that permutes in another way is asked for whole permutations."""
    randperm._is_as_expected.cache_clear()
    words = randperm.words
    monkeypatch.setattr(randperm, "words", lambda generator, count: words(generator, count) ^ 1)
    try:
        assert not randperm.can(70_000)
    finally:
        randperm._is_as_expected.cache_clear()
