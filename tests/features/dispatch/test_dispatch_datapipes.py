"""IterDataPipes that dispatch, translated, or refused with what stands in the way."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import IterDataPipe, functional_datapipe
from torch.utils.data.datapipes.iter import IterableWrapper

from ringloader import DataLoader, Dispatch


@functional_datapipe("sharding_round_robin_dispatch", enable_df_api_tracing=False)
class ShardingRoundRobinDispatcherIterDataPipe(IterDataPipe):
    """MIRRORS torchdata 0.9 datapipes/iter/util/sharding.py, whose own iteration is the source's."""

    def __init__(self, source_datapipe, sharding_group_filter=None):
        self.source_datapipe = source_datapipe
        self.sharding_group_filter = sharding_group_filter

    def __iter__(self):
        yield from self.source_datapipe


def with_pid(item):
    return item, os.getpid()


def add_pid(item):
    return *item, os.getpid()


def is_low(item):
    return item[0] < 6


def as_it_is(item):
    return item


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_chain_is_read_once_and_goes_on_in_the_workers(start):
    pipe = IterableWrapper(range(8)).map(with_pid).sharding_round_robin_dispatch().map(add_pid).filter(is_low)
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": start}
    loader = DataLoader(pipe, in_order=False, **options)
    assert isinstance(loader.dataset, Dispatch)
    for _ in range(2):
        found = list(loader)
        assert sorted(number for number, *_ in found) == list(range(6))
        readers, mappers = ({item[k] for item in found} for k in (1, 2))
        assert len(readers) == 1
        assert len(mappers) == 2
        assert len(readers | mappers | {os.getpid()}) == 4


def test_without_workers_it_runs_here_and_the_pipe_stays_the_callers():
    pipe = IterableWrapper(range(5)).sharding_round_robin_dispatch().batch(2)
    loader = DataLoader(dataset=pipe, batch_size=None, collate_fn=list)
    assert [list(loader) for _ in range(2)] == [[[0, 1], [2, 3], [4]]] * 2
    assert list(map(list, pipe)) == [[0, 1], [2, 3], [4]]


def test_a_graph_behind_it_that_meets_again():
    left, right = IterableWrapper(range(6)).sharding_round_robin_dispatch().fork(2)
    loader = DataLoader(left.zip(right), batch_size=None, num_workers=2, collate_fn=as_it_is)
    assert list(loader) == [(number, number) for number in range(6)]


def test_a_sharding_filter_in_front_of_it_is_for_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    pipe = IterableWrapper(range(9)).sharding_filter().sharding_round_robin_dispatch().sharding_filter()
    loader = DataLoader(pipe, batch_size=None, num_workers=2)
    monkeypatch.undo()
    assert list(loader) == [1, 4, 7]


def test_what_cannot_be_translated_is_an_error():
    other = IterableWrapper(range(3))
    one = IterableWrapper(range(3)).sharding_round_robin_dispatch()
    with pytest.raises(ValueError, match="IterableWrapperIterDataPipe is read in addition to"):
        DataLoader(one.zip(other), num_workers=2)
    with pytest.raises(ValueError, match="2 pipes sharding_round_robin_dispatch"):
        DataLoader(one.zip(other.sharding_round_robin_dispatch()), num_workers=2)
    with pytest.raises(ValueError, match="read through another"):
        DataLoader(one.map(as_it_is).sharding_round_robin_dispatch(), num_workers=2)


def test_pipes_that_may_drop_items_are_refused_in_order():
    pipe = IterableWrapper(range(8)).map(with_pid).sharding_round_robin_dispatch().filter(is_low)
    with pytest.raises(
        ValueError, match=r"FilterIterDataPipe and in_order=True .* 2 workers.*in_order=False"
    ):
        DataLoader(pipe.map(add_pid), num_workers=2)
    assert len(list(DataLoader(pipe, batch_size=None, num_workers=1, collate_fn=as_it_is))) == 6
    # In front of the dispatching one nothing matters.
    before = IterableWrapper(range(8)).map(with_pid).filter(is_low).sharding_round_robin_dispatch()
    assert len(list(DataLoader(before, batch_size=None, num_workers=2, collate_fn=as_it_is))) == 6


def test_other_pipes_stay_as_they_are():
    pipe = IterableWrapper(range(4)).sharding_filter()
    loader = DataLoader(pipe, batch_size=None, num_workers=2)
    assert not isinstance(loader.dataset, Dispatch)
    assert sorted(loader) == list(range(4))
