"""``WeightedRandomSampler`` for any number of weights; and the notice of a forgotten ``set_epoch``."""

import logging

import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import WeightedRandomSampler as Torchs
from torch.utils.data.distributed import DistributedSampler

from ringloader import DataLoader, StatefulDataLoader, WeightedRandomSampler
from ringloader._data import weighted as _weighted
from ringloader._torch import select_path


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("replacement", [True, False])
def test_as_torch_where_torch_can(replacement):
    weights = torch.rand(1000, generator=generator())
    ours, torchs = generator(1), generator(1)
    drawn = WeightedRandomSampler(weights, 500, replacement, ours)
    assert isinstance(drawn, Torchs) and list(drawn) == list(Torchs(weights, 500, replacement, torchs))
    assert torch.equal(ours.get_state(), torchs.get_state())


def test_without_replacement_the_draws_are_torchs_own(monkeypatch):
    weights = torch.rand(1000, generator=generator())
    expected = list(Torchs(weights, 400, False, generator(1)))
    monkeypatch.setattr(_weighted, "MULTINOMIAL", 100)
    assert list(WeightedRandomSampler(weights, 400, False, generator(1))) == expected


def test_more_weights_than_torch_takes():
    count = (1 << 24) + 5
    weights = torch.zeros(count, dtype=torch.double)
    weights[-3:] = torch.tensor([1.0, 0.0, 3.0])
    with pytest.raises(RuntimeError, match="2\\^24"):
        list(Torchs(weights, 10))
    found = list(WeightedRandomSampler(weights, 4000, True, generator()))
    assert set(found) == {count - 3, count - 1}
    assert abs(found.count(count - 1) / 4000 - 0.75) < 0.04
    assert sorted(WeightedRandomSampler(weights, 2, False, generator())) == [count - 3, count - 1]
    loader = DataLoader(
        range(count),
        sampler=WeightedRandomSampler(weights, 100, True, generator()),
        batch_size=50,
        num_workers=1,
    )
    assert set(torch.cat(list(loader)).tolist()) == {count - 3, count - 1}


@pytest.mark.parametrize("replacement", [True, False])
def test_the_distribution_is_that_of_the_weights(monkeypatch, replacement):
    monkeypatch.setattr(_weighted, "MULTINOMIAL", 2)
    weights = [0.0, 1.0, 2.0, 0.0, 3.0, 0.0]
    shared = generator(3)
    if replacement:
        drawn = torch.tensor(list(WeightedRandomSampler(weights, 60_000, True, shared)))
    else:
        # The first of a draw without replacement has the weights' distribution too.
        drawn = torch.tensor(
            [next(iter(WeightedRandomSampler(weights, 3, False, shared))) for _ in range(6000)]
        )
    parts = torch.bincount(drawn, minlength=6) / len(drawn)
    expected = torch.tensor(weights) / 6
    # Five standard deviations, at most.
    assert (parts - expected).abs().max() < 5 * (0.25 / len(drawn)) ** 0.5
    assert parts[expected == 0].sum() == 0


def test_the_generator_is_read_when_the_first_index_is_asked_for(monkeypatch):
    monkeypatch.setattr(_weighted, "MULTINOMIAL", 2)
    ours, stated = generator(), generator()
    indices = iter(WeightedRandomSampler([1.0] * 10, 7, True, ours))
    assert torch.equal(ours.get_state(), stated.get_state())
    next(indices)
    torch.rand(7, dtype=torch.float64, generator=stated)
    assert torch.equal(ours.get_state(), stated.get_state())
    next(iter(WeightedRandomSampler([1.0] * 10, 7, False, ours)))
    torch.empty(10, dtype=torch.float64).exponential_(generator=stated)
    assert torch.equal(ours.get_state(), stated.get_state())


@pytest.mark.parametrize(
    ("weights", "replacement", "message"),
    [
        ([1, -1, 1], True, "element < 0"),
        ([1, float("nan"), 1], True, "nan"),
        ([0, 0, 0], True, "sum of probabilities <= 0"),
        ([1e308, 1e308, 1e308], True, "infinite"),
        ([1, 0, 0], False, "only 1 weights are positive"),
    ],
)
def test_impossible_weights_are_refused(monkeypatch, weights, replacement, message):
    monkeypatch.setattr(_weighted, "MULTINOMIAL", 2)
    with pytest.raises(RuntimeError, match=message):
        list(WeightedRandomSampler(weights, 2, replacement))


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr(select_path, "_logged", set())
    caplog.set_level(logging.WARNING, "ringloader")
    return lambda: sum("set_epoch" in record.getMessage() for record in caplog.records)


def distributed(way, shuffle=True, cls=DataLoader):
    dataset = list(range(12))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=shuffle)
    options = {"num_workers": 0 if way == "without workers" else 1, "persistent_workers": way == "persistent"}
    if way == "batch sampler":
        return sampler, cls(dataset, batch_sampler=BatchSampler(sampler, 2, False), **options)
    return sampler, cls(dataset, batch_size=2, sampler=sampler, **options)


WAYS = ["native", "persistent", "without workers", "batch sampler"]


@pytest.mark.parametrize("way", WAYS)
def test_a_forgotten_set_epoch_is_said_once(way, said):
    _, loader = distributed(way)
    list(loader)
    assert said() == 0
    for _ in range(3):
        list(loader)
        assert said() == 1


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_where_it_was_called_or_nothing_shuffles(way, said):
    sampler, loader = distributed(way)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)
    _, loader = distributed(way, shuffle=False)
    list(loader)
    list(loader)
    assert said() == 0


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_where_an_epoch_goes_on(way, said):
    _, loader = distributed(way, cls=StatefulDataLoader)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert said() == 0
    list(loader)
    assert said() == 1


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_where_an_epoch_did_not_begin(way, said):
    _, loader = distributed(way)
    loader.generator = "not a generator"
    with pytest.raises(TypeError):
        iter(loader)
    loader.generator = None
    list(loader)
    assert said() == 0
