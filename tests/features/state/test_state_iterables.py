"""``state_dict`` of loaders whose dataset decides where an epoch is, and of datasets with a state."""

import itertools
import json
import pickle

import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info

import ringloader


def share(length):
    """The numbers of this worker. The last worker has fewer than the others."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return [number for number in range(length) if number * number % 7 % workers == worker]


class Plain(IterableDataset):
    """Has no state."""

    def __init__(self, length=50):
        self.length = length

    def __iter__(self):
        return iter(share(self.length))


class Stateful(Plain):
    """Goes on where its state is, and counts what it reads."""

    def __init__(self, length=50):
        super().__init__(length)
        self.at = 0

    def __iter__(self):
        mine = share(self.length)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class WithIterator(Plain):
    def __iter__(self):
        return Cursor(share(self.length))


class Cursor:
    def __init__(self, mine):
        self.mine, self.at = mine, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.mine):
            raise StopIteration
        self.at += 1
        return self.mine[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


KINDS = {"plain": Plain, "dataset": Stateful, "iterator": WithIterator}
WAYS = {
    "none": {},
    "two": {"num_workers": 2},
    "three, persistent": {"num_workers": 3, "persistent_workers": True},
    "any order": {"num_workers": 2, "in_order": False},
    "every third": {"num_workers": 2, "snapshot_every_n_steps": 3},
    "never": {"num_workers": 2, "snapshot_every_n_steps": None},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


def built(kind, way, size=4):
    return ringloader.StatefulDataLoader(KINDS[kind](), batch_size=size, collate_fn=list, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "iterator" else ()) for kind in KINDS]
)
def test_an_epoch_goes_on(kind, way):
    if kind == "dataset" and way == "threads":
        pytest.skip("threads share a dataset, whose state is then no worker's")
    is_ordered = way != "any order"
    whole = list(built(kind, way))
    for stop in (0, 1, 5, len(whole) - 1, len(whole)):
        stopped = built(kind, way)
        iterator = iter(stopped)
        got = list(itertools.islice(iterator, stop))
        state = pickle.loads(pickle.dumps(stopped.state_dict()))
        json.dumps(state)
        assert (state["_num_yielded"], state["_iterator_finished"]) == (stop, False)
        resumed = built(kind, way)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = list(resumed)
        if is_ordered:
            assert got + rest == whole
            assert list(resumed) == whole
        else:
            assert sorted(map(tuple, got + rest)) == sorted(map(tuple, whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_end_comes_the_next_epoch(workers):
    loader = ringloader.StatefulDataLoader(Stateful(), batch_size=4, collate_fn=list, num_workers=workers)
    first = list(loader)
    state = loader.state_dict()
    assert state["_iterator_finished"]
    resumed = ringloader.StatefulDataLoader(Stateful(), batch_size=4, collate_fn=list, num_workers=workers)
    resumed.load_state_dict(state)
    assert list(resumed) == first


def test_reading_again_is_said(caplog):
    loader = built("plain", "two")
    list(itertools.islice(loader, 3))
    resumed = built("plain", "two")
    resumed.load_state_dict(loader.state_dict())
    assert not caplog.records
    next(iter(resumed))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "state_dict" in caplog.text
    caplog.clear()
    stateful = built("iterator", "two")
    list(itertools.islice(stateful, 3))
    resumed = built("iterator", "two")
    resumed.load_state_dict(stateful.state_dict())
    next(iter(resumed))
    assert not caplog.records


def test_another_number_of_workers_is_an_error():
    loader = built("iterator", "two")
    next(iter(loader))
    state = loader.state_dict()
    other = built("iterator", "three, persistent")
    with pytest.raises(ValueError, match=r"num_workers=2.*num_workers=3"):
        other.load_state_dict(state)
    assert other.state_dict()["_num_yielded"] == 0


class Failing(Plain):
    def __iter__(self):
        return CursorThatFails(share(self.length))


class CursorThatFails(Cursor):
    def __next__(self):
        found = super().__next__()
        if found == 6:
            raise ValueError("a bad sample")
        return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raised_was_not_got(workers):
    def made():
        return ringloader.StatefulDataLoader(Failing(20), batch_size=2, collate_fn=list, num_workers=workers)

    loader = made()
    iterator = iter(loader)
    assert list(itertools.islice(iterator, 3)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    state = loader.state_dict()
    assert state["_num_yielded"] == 3
    resumed = made()
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="a bad sample"):
        next(iter(resumed))


class Remembering(torch.utils.data.Dataset):
    """A map-style dataset with a state: how often this worker was asked."""

    def __init__(self):
        self.asked = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.asked += 1
        return index, self.asked

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_dataset_with_a_state(workers, every):
    def made():
        return ringloader.StatefulDataLoader(
            Remembering(),
            batch_size=4,
            shuffle=True,
            collate_fn=list,
            num_workers=workers,
            snapshot_every_n_steps=every,
            generator=torch.Generator().manual_seed(3),
        )

    whole = list(made())
    for stop in (1, 4, 7):
        loader = made()
        got = list(itertools.islice(loader, stop))
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = made()
        resumed.load_state_dict(state)
        assert got + list(resumed) == whole


def test_another_datasets_state_is_an_error():
    loader = built("dataset", "two")
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="has no state_dict"):
        built("plain", "two").load_state_dict(state)
    mapped = ringloader.StatefulDataLoader([1, 2, 3])
    with pytest.raises(ValueError, match="that of IterableDataset"):
        mapped.load_state_dict(state)


def test_other_loaders_take_no_states():
    class Counting(Stateful):
        asked = 0

        def state_dict(self):
            Counting.asked += 1
            return super().state_dict()

    with ringloader.installed():
        assert len(list(torch.utils.data.DataLoader(Counting(), batch_size=4))) > 0
        list(
            torch.utils.data.DataLoader(
                Counting(), batch_size=4, num_workers=1, multiprocessing_context="fork"
            )
        )
    assert Counting.asked == 0
    list(ringloader.StatefulDataLoader(Plain(), batch_size=4))


class WithState(torch.utils.data.Dataset):
    """A map-style dataset that counts."""

    def __init__(self):
        self.count = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.count += 1
        return index

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("kind", [Stateful, WithState])
def test_threads_that_share_a_dataset_have_no_state(kind):
    def loader_of(workers, method):
        return ringloader.StatefulDataLoader(kind(), batch_size=4, num_workers=workers, worker_method=method)

    loader = loader_of(2, "thread")
    next(iter(loader))
    with pytest.raises(RuntimeError, match="2 threads share one dataset that has a state"):
        loader.state_dict()
    of_processes = loader_of(2, "multiprocessing")
    next(iter(of_processes))
    before = loader_of(2, "thread")
    with pytest.raises(ValueError, match="the 2 threads of this loader share one"):
        before.load_state_dict(of_processes.state_dict())
    # One thread shares it with nobody.
    alone = loader_of(1, "thread")
    iterator = iter(alone)
    next(iterator)
    resumed = loader_of(1, "thread")
    resumed.load_state_dict(alone.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in iterator]


@pytest.mark.parametrize("way", ["none", "two"])
def test_a_position_that_is_moved_back_before_the_state(way):
    whole = list(built("iterator", way))
    loader = built("iterator", way)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    # As accelerate's dispatcher does, which reads one batch ahead.
    state["_num_yielded"] -= 1
    resumed = built("iterator", way)
    resumed.load_state_dict(state)
    assert list(resumed) == whole[4:]
