"""The iterator of a loader without workers, options and states: who has it, and what it leaves as it was."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

import ringloader
from ringloader import DataLoader, StatefulDataLoader
from ringloader._core import notes
from ringloader._core.without_workers import IteratorWithOptions, SingleProcessIterator
from ringloader._features import arrays
from ringloader._torch import collating
from ringloader._worker.collate import Collation

pytestmark = pytest.mark.rings_only

DATA = list(range(6))


def batches_told() -> int:
    return sum(one.batches for one in ringloader.reports() if one.is_alive and one.loader.endswith("Told"))


class Told(DataLoader):
    """A loader whose reports are found by its name."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "shuffle": True, "generator": torch.Generator()},
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 2, False)},
        {"collate_fn": list, "drop_last": True, "batch_size": 4},
        {"batch_size": None},
        {"batch_sampler": [[1, 2], [3]]},
        {"sampler": DistributedSampler(DATA, 2, 0)},
    ],
)
def test_loaders_that_have_it(options):
    loader = DataLoader(DATA, **options)
    for _ in range(2):
        assert type(iter(loader)) is SingleProcessIterator
        assert ringloader.report(loader).path == "single-process"
    options = {**options, "generator": torch.Generator()} if "generator" in options else options
    theirs, ours = (list(one(DATA, **options)) for one in (torch.utils.data.DataLoader, DataLoader))
    if "generator" not in options:
        assert str(theirs) == str(ours)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, stats=True),
        lambda: DataLoader(DATA, on_error="skip"),
        lambda: StatefulDataLoader(DATA),
    ],
)
def test_loaders_that_have_another(make):
    assert type(iter(make())) is IteratorWithOptions


def test_arrays_are_gathered_by_the_first_iterator_and_by_later_ones():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(6)), batch_size=4)
    for _ in range(3):
        iterator = iter(loader)
        assert type(iterator) is SingleProcessIterator
        assert type(iterator._dataset_fetcher) is arrays.Gathering
        assert [batch.tolist() for (batch,) in iterator] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"stats": True}])
def test_a_loader_that_is_converted_between_its_iterators(options):
    loader = DataLoader(DATA)
    list(loader)
    ringloader.convert(loader, **options)
    assert type(iter(loader)) is IteratorWithOptions


def test_a_loader_whose_workers_are_set_between_its_iterators():
    loader = DataLoader(DATA)
    for workers, path in ((0, "single-process"), (1, "native"), (0, "single-process")):
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        iterator = iter(loader)
        assert (ringloader.report(iterator).path, len(list(iterator))) == (path, 6)


class RaisesOnce(SequentialSampler):
    """A sampler whose second iterator raises."""

    asked = 0

    def __iter__(self):
        self.asked += 1
        if self.asked == 2:
            raise LookupError("no order")
        return super().__iter__()


def test_each_iterator_is_noted_once():
    loader = DataLoader(DATA)
    alive = [iter(loader) for _ in range(3)]
    assert notes.iterators_of(loader) == alive
    assert len({id(notes.of(iterator)) for iterator in alive}) == 3
    last = alive.pop()
    assert notes.of(last) is notes.of(loader)
    alive.clear()
    assert notes.iterators_of(loader) == [last]
    loader = DataLoader(DATA, batch_size=None, sampler=RaisesOnce(DATA))
    list(loader)
    before = notes.of(loader)
    with pytest.raises(LookupError):
        iter(loader)
    assert notes.of(loader) is before
    list(loader)
    assert notes.of(loader) is not before


def test_batches_are_counted_over_iterators_that_live_and_that_are_gone():
    loader = Told(DATA)
    for _ in range(3):
        list(loader)
    assert batches_told() == 18
    one, other = iter(loader), iter(loader)
    next(one), next(other), next(other)
    assert batches_told() == 21
    del one
    gc.collect()
    third = iter(loader)
    assert (next(third), batches_told()) == (torch.tensor([0]), 22)
    assert ringloader.report(third).path == ringloader.report(other).path == "single-process"
    del other, third
    gc.collect()
    assert batches_told() == 22


def test_its_collation_is_renewed_when_others_teach_torch_a_class(monkeypatch):
    class Own:
        pass

    loader = DataLoader([Own(), Own()], batch_size=2)
    first = iter(DataLoader(DATA))._dataset_fetcher.collate_fn
    assert iter(DataLoader(DATA))._dataset_fetcher.collate_fn is first
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        next(iter(loader))
    monkeypatch.setitem(collating.collate_fn_map, Own, lambda batch, **_: len(batch))
    assert list(loader) == [2]
    assert iter(DataLoader(DATA))._dataset_fetcher.collate_fn is not first
    monkeypatch.undo()
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        next(iter(loader))


def test_other_code_in_a_function_that_default_collate_calls():
    """Iterators look for other functions only. No tool is known that changes the code."""
    function = collating.collate_fn_map[torch.Tensor]
    data = [torch.zeros(1), torch.ones(1)]
    assert isinstance(iter(DataLoader(data))._dataset_fetcher.collate_fn, Collation)
    code = function.__code__
    try:
        function.__code__ = (lambda batch, *, collate_fn_map=None: "other").__code__  # noqa: ARG005
        assert list(torch.utils.data.DataLoader(data, batch_size=2)) == ["other"]
        for options in ({}, {"num_workers": 1}, {"on_error": "skip"}):
            batches = DataLoader(data, batch_size=2, **options)
            assert [batch.tolist() for batch in batches] == [[[0.0], [1.0]]]
    finally:
        function.__code__ = code


@pytest.mark.parametrize("name", ["dataset", "batch_sampler", "collate_fn", "generator"])
def test_the_error_of_a_missing_attribute_names_the_loader(name):
    """The attributes are read from another object, which no program knows."""
    texts = []
    for cls in (torch.utils.data.DataLoader, DataLoader):
        loader = cls([1, 2])
        delattr(loader, name)
        with pytest.raises(AttributeError) as caught:
            iter(loader)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
