"""Datasets that keep a loaded state, and begin each ``__iter__`` from it: no later epoch may lose samples."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import ringloader

LENGTH = 22


class Keeping(IterableDataset):
    """Begins each epoch where the loaded state was, as the streams of Hugging Face do."""

    def __init__(self):
        self.start = 0
        self.at = 0

    def part(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(LENGTH)[worker::workers]

    def __iter__(self):
        part = self.part()
        self.at = self.start
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class NoStateBefore(Keeping):
    """Has a state once it is iterated."""

    def __iter__(self):
        self.has_begun = True
        yield from super().__iter__()

    def state_dict(self):
        return super().state_dict() if hasattr(self, "has_begun") else None

    def load_state_dict(self, state):
        if state is not None:
            super().load_state_dict(state)


class RaisesBefore(NoStateBefore):
    def state_dict(self):
        if not hasattr(self, "has_begun"):
            raise RuntimeError("iterate it first")
        return super().state_dict()


class InPlace(Keeping):
    """Changes what it has when a state is loaded, and sets no attribute."""

    def __init__(self):
        super().__init__()
        self.place = {"start": 0}

    def __iter__(self):
        self.start = self.place["start"]
        return super().__iter__()

    def load_state_dict(self, state):
        self.place["start"] = state["at"]


class InPlaceNoStateBefore(InPlace):
    """Must be copied."""

    def __init__(self):
        super().__init__()
        self.has_begun = False

    def __iter__(self):
        self.has_begun = True
        return super().__iter__()

    def state_dict(self):
        return super().state_dict() if self.has_begun else None


class Uncopyable(InPlaceNoStateBefore):
    def __deepcopy__(self, memo):
        raise TypeError("it has a connection")


class WithTensors(Keeping):
    """The pickles of equal tensors differ."""

    def state_dict(self):
        return {"at": torch.tensor(self.at), "seeds": [torch.arange(3)]}

    def load_state_dict(self, state):
        self.start = int(state["at"])


class Place:
    def __init__(self, at):
        self.at = torch.tensor(at)


class WithObjects(Keeping):
    """So do those of sets, of dicts in another order, and of objects that have tensors."""

    def __init__(self):
        super().__init__()
        self.flip = False

    def state_dict(self):
        self.flip = not self.flip
        # 8 comes before 0 in a set to which it was added first.
        names = [{8: "a", 0: "b"}, {8, 0}] if self.flip else [{0: "b", 8: "a"}, {0, 8}]
        return {"place": Place(self.at), "names": names}

    def load_state_dict(self, state):
        self.start = int(state["place"].at)


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


class WithIterator(Keeping):
    """Its iterator has a state too."""

    def __iter__(self):
        return Cursor(super().__iter__())


class Cursor:
    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def __iter__(self):
        return self

    def __next__(self):
        found = next(self.inner)
        self.count += 1
        return found

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class OwnIterator(Keeping):
    """Is its own iterator."""

    def __iter__(self):
        self.at = self.start
        return self

    def __next__(self):
        part = self.part()
        if self.at == len(part):
            raise StopIteration
        self.at += 1
        return part[self.at - 1]

    def load_state_dict(self, state):
        self.start = self.at = state["at"]


class GoingOn(Keeping):
    """Keeps nothing: it goes on where it is, and begins anew at its end."""

    def __iter__(self):
        part = self.part()
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]
        self.at = 0

    def load_state_dict(self, state):
        self.at = state["at"]


class GoingOnUncopyable(GoingOn):
    """Has no beginning that could be had, and needs none."""

    def __init__(self):
        super().__init__()
        self.has_begun = False

    def __iter__(self):
        self.has_begun = True
        return super().__iter__()

    def state_dict(self):
        return super().state_dict() if self.has_begun else None

    def __deepcopy__(self, memo):
        raise TypeError("it has a connection")


KEEPING = {
    kind.__name__: kind
    for kind in (
        Keeping,
        NoStateBefore,
        RaisesBefore,
        InPlace,
        InPlaceNoStateBefore,
        WithTensors,
        WithObjects,
        Wrapping,
        WithIterator,
        OwnIterator,
    )
}
OTHERS = {"GoingOn": GoingOn, "GoingOnUncopyable": GoingOnUncopyable}


class ReadingAhead(Keeping):
    """Its state depends on what threads have read ahead, and it keeps the loaded one itself."""

    loaded = None

    def __iter__(self):
        self.start = 0 if self.loaded is None else self.loaded["at"]
        return super().__iter__()

    def state_dict(self):
        return {**super().state_dict(), "ahead": torch.rand(()).item()}

    def load_state_dict(self, state):
        self.loaded = state


KEEPING["ReadingAhead"] = ReadingAhead
WAYS = {
    "none": {},
    "one": {"num_workers": 1, "persistent_workers": True},
    "two": {"num_workers": 2, "persistent_workers": True},
    "thread": {"num_workers": 1, "worker_method": "thread"},
    "every third": {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": 3},
}


def built(dataset, way, size=2):
    return ringloader.StatefulDataLoader(dataset, batch_size=size, collate_fn=list, **WAYS[way])


def states(make, way, size=2):
    """Yields states at several positions, their loaders, and what comes after each in its epoch."""
    whole = list(built(make(), way, size))
    for stop in sorted({0, 1, 3, len(whole) - 1, len(whole)}):
        for epochs in range(2):
            loader = built(make(), way, size)
            for _ in range(epochs):
                assert list(loader) == whole
            iterator = iter(loader)
            assert list(itertools.islice(iterator, stop)) == whole[:stop]
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            # Its thread would read on in the same dataset.
            del iterator
            yield state, loader, whole[stop:], whole
    loader = built(make(), way, size)
    assert list(loader) == whole
    yield pickle.loads(pickle.dumps(loader.state_dict())), loader, whole, whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*KEEPING, *OTHERS])
def test_the_epochs_after_a_resumed_one_are_whole(kind, way):
    make = (KEEPING | OTHERS)[kind]
    for state, _, rest, whole in states(make, way):
        loader = built(make(), way)
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(4)] == [rest, whole, whole, whole]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in (*KEEPING, "GoingOn") if kind != "InPlaceNoStateBefore"])
def test_a_dataset_that_lives_on_is_resumed_in_the_same_loader(kind, way):
    make = (KEEPING | OTHERS)[kind]
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


@pytest.mark.parametrize("way", WAYS)
def test_a_dataset_that_cannot_be_brought_to_its_beginning_is_an_error(way):
    loader = built(Uncopyable(), way)
    whole = list(built(Uncopyable(), way))
    list(itertools.islice(loader, 3))
    resumed = built(Uncopyable(), way)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == whole[3:]
    with pytest.raises(RuntimeError, match="the Uncopyable keeps the state that was loaded"):
        list(resumed)


class OfAnEpoch(Keeping):
    """Takes a loaded state only for an epoch of that number."""

    def __init__(self):
        super().__init__()
        self.epoch = self.loaded_epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        start, self.start = self.start, self.start if self.epoch == self.loaded_epoch else 0
        yield from super().__iter__()
        self.start = start

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start, self.loaded_epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("way", ["none", "two"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_state_of_another_epoch(way, stop):
    """A worker that has given no batch of this epoch has the state of the one before."""

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
    """The epoch that began from the state raised its first batch, and the next one does too."""

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


def test_a_dataset_is_not_copied_without_need():
    class Counting(Keeping):
        copies = 0

        def __deepcopy__(self, memo):
            Counting.copies += 1
            return copy.copy(self)

    for state, _, rest, whole in states(Counting, "none"):
        loader = built(Counting(), "none")
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(2)] == [rest, whole]
    assert Counting.copies == 0
