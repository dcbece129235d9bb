"""Datasets that live on after a resumed epoch: how their later epochs begin."""

import itertools
import pickle
import random

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import ringloader

LENGTH = 22


class Stream(IterableDataset):
    """Goes on where it is, and begins anew at its end."""

    at = 0

    def part(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(LENGTH)[worker::workers]

    def __iter__(self):
        part = self.part()
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Keeping(Stream):
    """Begins each epoch from the state that was loaded, as the streams of Hugging Face do."""

    _starting_state_dict = None

    def __iter__(self):
        part = self.part()
        self.at = 0 if self._starting_state_dict is None else self._starting_state_dict["at"]
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]

    def load_state_dict(self, state):
        self._starting_state_dict = state


class WithPart(Keeping):
    """Keeps a part of its state."""

    def state_dict(self):
        return {"place": {"at": self.at}, "other": [1]}

    def load_state_dict(self, state):
        self._starting_state_dict = state["place"]


class Wrapping(IterableDataset):
    """Hands its state over to another dataset."""

    def __init__(self):
        self.inner = [Keeping()]

    def __iter__(self):
        return iter(self.inner[0])

    def state_dict(self):
        return {"inner": self.inner[0].state_dict()}

    def load_state_dict(self, state):
        self.inner[0].load_state_dict(state["inner"])


class NoStateBefore(Keeping):
    """Has a state once it is iterated."""

    has_begun = False

    def __iter__(self):
        self.has_begun = True
        yield from super().__iter__()

    def state_dict(self):
        return super().state_dict() if self.has_begun else None


class RaisesBefore(NoStateBefore):
    def state_dict(self):
        if not self.has_begun:
            raise RuntimeError("iterate it first")
        return super().state_dict()


class Uncopyable(Keeping):
    def __deepcopy__(self, memo):
        raise TypeError("it has a connection")


class ReadingAhead(Keeping):
    """Its state depends on what threads have read ahead."""

    def state_dict(self):
        return {**super().state_dict(), "ahead": random.random()}


class NoPlaceAtFirst(Keeping):
    """Its state before its first epoch is no place to begin from, as that of some mixed streams."""

    at = None

    def __iter__(self):
        if self._starting_state_dict is not None and self._starting_state_dict["at"] is None:
            raise RuntimeError("it has no such place")
        yield from super().__iter__()


KEEPING = [
    *(Keeping, WithPart, Wrapping, NoStateBefore, RaisesBefore, Uncopyable),
    *(ReadingAhead, NoPlaceAtFirst, Stream),
]
WAYS = {
    "none": {},
    "one": {"num_workers": 1, "persistent_workers": True},
    "two": {"num_workers": 2, "persistent_workers": True},
    "thread": {"num_workers": 1, "worker_method": "thread"},
    "every third": {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": 3},
}


def built(dataset, way, size=2):
    return ringloader.StatefulDataLoader(dataset, batch_size=size, collate_fn=list, **WAYS[way])


def states(make, way):
    """Yields states at several positions, their loaders, and what comes after each in its epoch."""
    whole = list(built(make(), way))
    for stop in sorted({0, 1, 3, len(whole) - 1, len(whole)}):
        for epochs in range(2):
            loader = built(make(), way)
            for _ in range(epochs):
                assert list(loader) == whole
            iterator = iter(loader)
            assert list(itertools.islice(iterator, stop)) == whole[:stop]
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            # Its thread would read on in the same dataset.
            del iterator
            yield state, loader, whole[stop:], whole
    loader = built(make(), way)
    assert list(loader) == whole
    yield pickle.loads(pickle.dumps(loader.state_dict())), loader, whole, whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", KEEPING)
def test_the_epochs_after_a_resumed_one_are_whole(make, way):
    for state, _, rest, whole in states(make, way):
        loader = built(make(), way)
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(3)] == [rest, whole, whole]


# A stream that goes on by itself stays where it is if the state has none of its own.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [one for one in KEEPING if one is not Stream])
def test_a_dataset_that_lives_on_is_resumed_in_the_same_loader(make, way):
    for state, loader, rest, whole in states(make, way):
        for _ in range(2):
            loader.load_state_dict(state)
            assert [list(loader) for _ in range(3)] == [rest, whole, whole]


@pytest.mark.parametrize("way", ["none", "two"])
def test_a_sample_that_the_program_reads_before_counts_for_nothing(way):
    for state, _, rest, whole in states(Keeping, way):
        dataset = Keeping()
        next(iter(dataset))
        loader = built(dataset, way)
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(3)] == [rest, whole, whole]


def test_another_loader_of_a_dataset_in_this_process_begins_at_the_beginning():
    dataset = Keeping()
    first = built(dataset, "none")
    whole = list(first)
    list(itertools.islice(first, 3))
    state = first.state_dict()
    second = built(dataset, "none")
    second.load_state_dict(state)
    assert list(second) == whole[3:]
    # In each epoch a loader of its own.
    for _ in range(2):
        assert list(built(dataset, "none")) == whole


class Counting(Stream):
    """Counts its epochs, draws its seed once, and has both in its state."""

    def __init__(self, seed):
        self.epoch, self.seed = 0, seed

    def __iter__(self):
        order = random.Random(self.seed + self.epoch).sample(self.part(), len(self.part()))
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state):
        self.at, self.epoch, self.seed = state["at"], state["epoch"], state["seed"]


@pytest.mark.parametrize("way", ["none", "one", "two"])
def test_a_dataset_that_goes_on_by_itself_keeps_what_was_loaded(way):
    """After a resumed epoch its counts and its seed are those of the run that was stopped."""
    loader = built(Counting(1000), way)
    epochs = [list(loader) for _ in range(4)]
    loader = built(Counting(1000), way)
    list(loader)
    assert list(itertools.islice(loader, 3)) == epochs[1][:3]
    resumed = built(Counting(2000), way)
    resumed.load_state_dict(loader.state_dict())
    assert [list(resumed) for _ in range(3)] == [epochs[1][3:], *epochs[2:]]


@pytest.mark.parametrize("way", WAYS)
def test_between_two_epochs_the_state_has_none_of_the_dataset(way):
    """It is the next epoch, from the beginning that the dataset has in the new program."""
    first = built(Counting(1000), way)
    whole = list(first)
    state = first.state_dict()
    assert state["_iterator_finished"]
    resumed = built(Counting(1000), way)
    resumed.load_state_dict(state)
    assert list(resumed) == whole


def test_an_epoch_that_was_broken_off_is_still_that_epoch():
    loader = built(Stream(), "none")
    whole = list(loader)
    for batch in loader:
        if batch == whole[2]:
            break
    state = loader.state_dict()
    assert (state["_num_yielded"], state["_iterator_finished"]) == (3, False)
    resumed = built(Stream(), "none")
    resumed.load_state_dict(state)
    assert [list(resumed) for _ in range(2)] == [whole[3:], whole]


class OfAnEpoch(Keeping):
    """Takes a loaded state only for an epoch of that number."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        loaded = self._starting_state_dict
        if loaded is not None and self.epoch != loaded["epoch"]:
            self._starting_state_dict = None
        yield from super().__iter__()
        self._starting_state_dict = loaded

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}


@pytest.mark.parametrize("way", ["none", "two"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_state_of_another_epoch(way, stop):
    loader = built(OfAnEpoch(), way)
    whole = list(loader)
    loader.set_epoch(1)
    assert list(itertools.islice(loader, stop)) == whole[:stop]
    resumed = built(OfAnEpoch(), way)
    resumed.load_state_dict(loader.state_dict())
    for epoch in range(1, 4):
        resumed.set_epoch(epoch)
        assert list(resumed) == whole[stop if epoch == 1 else 0 :]


@pytest.mark.parametrize("way", ["none", "two"])
def test_a_batch_that_raises_first(way):
    """The epoch that began from the state raised its first batch, and the next one does in its turn."""

    class Raising(Keeping):
        def __iter__(self):
            for found in super().__iter__():
                if found == 12:
                    raise ValueError("a bad sample")
                yield found

    def read(loader):
        found = []
        iterator = iter(loader)
        while True:
            try:
                found.append(next(iterator))
            except StopIteration:
                return found
            except ValueError:
                found.append("bad")

    whole = read(built(Raising(), way))
    loader = built(Raising(), way)
    list(itertools.islice(loader, whole.index("bad")))
    resumed = built(Raising(), way)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed)[:1] == ["bad"]
    assert read(resumed) == whole
    assert read(resumed) == whole
