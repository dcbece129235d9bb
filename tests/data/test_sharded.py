"""`Sharded`: which item goes where, and what uneven shards have."""

from __future__ import annotations

import copy
import pickle
import sys
from itertools import chain

import pytest
import torch
import torch.utils.data

import ringloader
from ringloader import Sharded


class Numbers:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class OwnShards(Numbers):
    """A source that is cut into runs."""

    def shard(self, n, i):
        return range(i * self.n // n, (i + 1) * self.n // n)


def of_ranks(n, replicas, workers, uneven):
    """Returns what each rank's loader gives, by worker where it has any."""
    return [
        list(
            ringloader.DataLoader(
                Sharded(Numbers(n), uneven=uneven, num_replicas=replicas, rank=rank),
                None,
                num_workers=workers,
            )
        )
        for rank in range(replicas)
    ]


@pytest.mark.parametrize("n", [0, 1, 5, 12, 13])
@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (1, 2), (3, 0), (2, 2)])
def test_each_item_goes_to_one_shard(n, replicas, workers):
    found = of_ranks(n, replicas, workers, "keep")
    # A rank's are the same with any number of workers, and in the source's order.
    assert found == [list(range(rank, n, replicas)) for rank in range(replicas)]


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize(("replicas", "workers"), [(3, 0), (2, 2)])
def test_uneven_shards_are_made_even(n, replicas, workers):
    shards = replicas * max(workers, 1)
    dropped = of_ranks(n, replicas, workers, "drop")
    assert sorted(chain(*dropped)) == list(range(n - n % shards))
    padded = of_ranks(n, replicas, workers, "pad")
    again = [k % n for k in range(-n % shards)] if n else []
    assert sorted(chain(*padded)) == sorted([*range(n), *again])
    for found in (dropped, padded):
        assert len({len(one) for one in found}) == 1


def test_padding_is_that_of_the_distributed_sampler():
    for n in (1, 2, 5, 7, 9):
        samplers = [
            torch.utils.data.DistributedSampler(range(n), num_replicas=4, rank=rank, shuffle=False)
            for rank in range(4)
        ]
        assert of_ranks(n, 4, 0, "pad") == [list(one) for one in samplers]


def test_a_source_that_shards_itself():
    found = of_ranks_of_own(12, 2, 2)
    assert sorted(chain(*found)) == list(range(12))
    # Rank 0 has the shards 0 and 2 of four.
    assert sorted(found[0]) == [0, 1, 2, 6, 7, 8]
    with pytest.raises(ValueError, match=r"has its own shard\(\): use uneven='keep'"):
        Sharded(OwnShards(3), uneven="pad")


def of_ranks_of_own(n, replicas, workers):
    datasets = [Sharded(OwnShards(n), num_replicas=replicas, rank=rank) for rank in range(replicas)]
    return [list(ringloader.DataLoader(one, None, num_workers=workers)) for one in datasets]


@pytest.mark.parametrize("loader", [ringloader.DataLoader, torch.utils.data.DataLoader])
def test_any_loader_takes_it(loader):
    assert sorted(loader(Sharded(Numbers(9)), None, num_workers=2)) == list(range(9))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rank_and_world_are_those_of_the_process_group(start, tmp_path, monkeypatch):
    # A process group replaces it for good.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    made = Sharded(Numbers(7))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert list(made) == list(range(7))
        loader = ringloader.DataLoader(made, None, num_workers=2, multiprocessing_context=start)
        assert sorted(loader) == list(range(7))
        assert pickle.loads(pickle.dumps(made))._place == (1, 0)
    finally:
        torch.distributed.destroy_process_group()


def test_the_rank_travels_with_the_dataset(monkeypatch):
    made = Sharded(Numbers(7))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    sent = pickle.dumps(made)
    monkeypatch.undo()
    assert list(made) == list(range(7))
    # In a process without a group.
    assert list(pickle.loads(sent)) == [1, 4]


def test_the_length_is_the_ranks():
    assert len(Sharded(range(7), num_replicas=2, rank=1)) == 3
    assert len(copy.copy(Sharded(range(7)))) == 7
    for unknown in (Sharded(range(3), uneven="drop"), Sharded(OwnShards(3), num_replicas=2, rank=0)):
        with pytest.raises(TypeError):
            len(unknown)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="needs an iterable, not an object of type int"):
        Sharded(3)
    with pytest.raises(ValueError, match="uneven must be one of 'keep', 'drop', 'pad', not 'leave'"):
        Sharded([], uneven="leave")
    with pytest.raises(ValueError, match="num_replicas=2 and rank=None go together"):
        Sharded([], num_replicas=2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 1"):
            Sharded([], num_replicas=2, rank=rank)
