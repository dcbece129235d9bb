"""``StatefulDataLoader`` as a class beside ``DataLoader``, and what it keeps alive."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

import ringloader
from ringloader import DataLoader, StatefulDataLoader

pytestmark = pytest.mark.rings_only

NAMES = ("state_dict", "load_state_dict", "fingerprint")


class Numbers(Dataset):
    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return int(index)


class Stream(IterableDataset):
    """Has a state, and goes on from where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Order(Sampler):
    """Has a state."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 24

    def __iter__(self):
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    state_dict, load_state_dict = Stream.state_dict, Stream.load_state_dict


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_without_states_names_the_class_that_has_them(name):
    loader = DataLoader(Numbers())
    assert not hasattr(loader, name) and not hasattr(DataLoader, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*ringloader.StatefulDataLoader"):
        getattr(loader, name)
    assert hasattr(StatefulDataLoader(Numbers()), name)


def test_other_names_raise_as_without_states():
    class Failing(DataLoader):
        @property
        def length(self):
            raise AttributeError("it is not known yet")

    with pytest.raises(AttributeError, match=r"^'DataLoader' object has no attribute 'sate_dict'$"):
        DataLoader(Numbers()).sate_dict  # noqa: B018
    with pytest.raises(AttributeError, match=r"^it is not known yet$"):
        Failing(Numbers()).length  # noqa: B018
    assert copy.copy(DataLoader(Numbers())).batch_size == 1


def test_the_option_is_of_the_class_that_has_states():
    with pytest.raises(TypeError, match="snapshot_every_n_steps"):
        DataLoader(Numbers(), snapshot_every_n_steps=2)
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be positive, not 0"):
        StatefulDataLoader(Numbers(), snapshot_every_n_steps=0)
    assert StatefulDataLoader(Numbers(), 4, snapshot_every_n_steps=3).snapshot_every_n_steps == 3
    assert not hasattr(DataLoader(Numbers()), "snapshot_every_n_steps")


def test_convert_keeps_the_kind():
    stateful = ringloader.convert(StatefulDataLoader(Numbers(), 4), on_error="skip")
    assert type(stateful) is StatefulDataLoader
    stateless = ringloader.convert(torch.utils.data.DataLoader(Numbers(), 4))
    assert type(stateless) is DataLoader


def test_a_module_as_dataset_keeps_its_weights():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

        def state_dict(self, *_args, **_kwargs):
            raise AssertionError("weights are no position")

    loader = StatefulDataLoader(Module(), batch_size=2)
    next(iter(loader))
    assert loader.state_dict()["workers"] is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("holder", ["dataset", "sampler", "collate_fn"])
def test_a_loader_that_its_dataset_refers_to_is_freed(cls, holder, workers):
    dataset, sampler = Numbers(8), Order()
    loader = cls(dataset, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=Collate())
    {"dataset": dataset, "sampler": sampler, "collate_fn": loader.collate_fn}[holder].loader = loader
    next(iter(loader))
    gone = weakref.ref(loader), weakref.ref(dataset), weakref.ref(sampler)
    del loader, dataset, sampler
    gc.collect()
    assert [one() for one in gone] == [None] * 3


class Collate:
    def __call__(self, samples):
        return samples


def test_the_samplers_iterator_goes_with_the_loaders():
    class Items:
        def __iter__(self):
            return self

        def __next__(self):
            return 3

    class Given(Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            given.append(weakref.ref(made := Items()))
            return made

    given = []
    loader = StatefulDataLoader(Numbers(), batch_size=2, sampler=Given())
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    assert [one() for one in given] == [None] * len(given)
    assert loader.state_dict()["batches"] == 1


class Unlucky(Order):
    def state_dict(self):
        raise OSError("the disk is full")


class Locked(Order):
    def state_dict(self):
        return {"at": self.at, "lock": (one for one in ())}


class UnluckyStream(Stream):
    state_dict = Unlucky.state_dict


class LockedStream(Stream):
    state_dict = Locked.state_dict


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Unlucky, Locked, UnluckyStream, LockedStream])
def test_a_state_that_cannot_be_taken_is_an_error_where_it_is_taken(kind, workers):
    given = (Numbers(), {"sampler": kind()}) if issubclass(kind, Sampler) else (kind(), {})
    loader = StatefulDataLoader(given[0], batch_size=4, num_workers=workers, **given[1])
    with pytest.raises((OSError, TypeError), match=r"disk is full|cannot pickle 'generator' object"):
        next(iter(loader))
        # Without workers, that of a stream is taken when it is asked for.
        assert issubclass(kind, Stream) and workers == 0
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_whose_state_cannot_be_taken_is_read_where_none_is_taken(workers):
    loader = StatefulDataLoader(
        UnluckyStream(), batch_size=4, num_workers=workers, snapshot_every_n_steps=None
    )
    assert torch.cat(list(loader)).tolist() == list(range(24))
    assert loader.state_dict()["batches"] == 6


class Told(Stream):
    """Tells when an iterator of it goes."""

    def __init__(self):
        super().__init__()
        self.gone = 0

    def __iter__(self):
        try:
            yield from super().__iter__()
        finally:
            self.gone += 1


def test_the_iterator_of_a_broken_off_epoch_lives_until_the_next_one():
    loader = StatefulDataLoader(Told(), batch_size=4)
    for _ in loader:
        break
    gc.collect()
    assert loader.dataset.gone == 0
    assert loader.state_dict()["workers"]["parts"] == [{"batches": 1, "dataset": {"at": 4}}]
    iterator = iter(loader)
    gc.collect()
    assert loader.dataset.gone == 1
    del loader
    del iterator


def test_copies_and_pickles_have_no_epoch_of_the_loader():
    loader = StatefulDataLoader(Numbers(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.state_dict()["batches"] == 0
    assert loader.state_dict()["batches"] == 1
