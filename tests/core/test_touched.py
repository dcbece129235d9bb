"""A plain ``DataLoader`` asks the program's objects for what torch's asks them, and for nothing else."""

import collections
import unittest.mock

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler

import ringloader

pytestmark = pytest.mark.rings_only

# Of each object: the names that were looked up, in this process.
touched: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)

N = 12


def noting(label):
    """Returns a method that notes each attribute that is looked up on an instance."""

    def __getattribute__(self, name):  # noqa: N807
        touched[label][name] += 1
        return object.__getattribute__(self, name)

    return __getattribute__


class Data(Dataset):
    __getattribute__ = noting("dataset")

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor(index)

    def set_epoch(self, _epoch):
        raise AssertionError("nobody asked for it")

    def state_dict(self):
        raise AssertionError("nobody asked for it")

    load_state_dict = set_epoch


class Stream(IterableDataset):
    __getattribute__ = noting("dataset")

    def __iter__(self):
        return iter(range(N))

    state_dict = load_state_dict = Data.state_dict


class Order(torch.utils.data.Sampler):
    __getattribute__ = noting("sampler")

    def __init__(self):
        self.epoch = 3
        self.generator = torch.Generator()
        self.sampler = self

    def __iter__(self):
        return iter(range(N))

    def __len__(self):
        return N

    set_epoch = Data.set_epoch
    state_dict = load_state_dict = Data.state_dict


class Batches(Order):
    __getattribute__ = noting("batch_sampler")

    def __iter__(self):
        return iter([[0, 1], [2], [3, 4, 5]])


class Random(RandomSampler):
    __getattribute__ = noting("sampler")


class TorchsBatches(BatchSampler):
    __getattribute__ = noting("batch_sampler")


class Collate:
    __getattribute__ = noting("collate_fn")

    def __call__(self, samples):
        return torch.stack([torch.as_tensor(one) for one in samples])


class Generator(torch.Generator):
    __getattribute__ = noting("generator")


KINDS = {
    "plain": lambda: (Data(), {"batch_size": 4}),
    "shuffled": lambda: (Data(), {"batch_size": 4, "shuffle": True}),
    "generator": lambda: (Data(), {"batch_size": 4, "shuffle": True, "generator": Generator()}),
    "sampler": lambda: (Data(), {"batch_size": 4, "sampler": Order()}),
    "samples": lambda: (Data(), {"batch_size": None, "sampler": Order()}),
    "batch sampler": lambda: (Data(), {"batch_sampler": Batches()}),
    "random": lambda: (Data(), {"batch_size": 4, "sampler": Random(range(N))}),
    "batches": lambda: (Data(), {"batch_sampler": TorchsBatches(SequentialSampler(range(N)), 4, False)}),
    "collate_fn": lambda: (Data(), {"batch_size": 4, "collate_fn": Collate()}),
    "stream": lambda: (Stream(), {"batch_size": 4}),
}
# Options that need no more than torch does.
OPTIONS = {
    "none": {},
    "device_prefetch": {"device_prefetch": 1},
    "last_batch": {"last_batch": "keep"},
    "restart_workers": {"restart_workers": 2},
    "watchdog": {"watchdog": 30},
    "stats": {"stats": True},
    "max_shared_bytes": {"max_shared_bytes": 1 << 24},
    "on_error": {"on_error": "skip"},
    "seeding": {"seeding": "epoch"},
    "main_prefetch": {"main_prefetch": 1},
}
WORKERS = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


def touched_by(loader_class, kind, **options):
    dataset, given = KINDS[kind]()
    touched.clear()
    loader = loader_class(dataset, **given, **options)
    for _ in range(2):
        assert len(list(loader)) > 1
    del loader
    found = {label: dict(names) for label, names in touched.items()}
    touched.clear()
    return found


@pytest.mark.parametrize("workers", [way for way in WORKERS if way != "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_without_options(kind, workers):
    theirs = touched_by(torch.utils.data.DataLoader, kind, **WORKERS[workers])
    assert touched_by(ringloader.DataLoader, kind, **WORKERS[workers]) == theirs


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream"])
def test_options_that_need_no_more(kind, option):
    if option == "last_batch" and kind == "batch sampler":
        pytest.skip("a batch sampler says itself what it does")
    theirs = touched_by(torch.utils.data.DataLoader, kind, **WORKERS["persistent"])
    assert touched_by(ringloader.DataLoader, kind, **WORKERS["persistent"], **OPTIONS[option]) == theirs


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"stats": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_options_without_workers(kind, options):
    """A batch reads no ``__class__``, which ``isinstance`` does."""
    theirs = touched_by(torch.utils.data.DataLoader, kind)
    assert touched_by(ringloader.DataLoader, kind, **options) == theirs


@pytest.mark.parametrize("options", [{"seeding": "sample"}, {"seeding": "batch", "seed": 3}])
@pytest.mark.parametrize("workers", ["none", "persistent"])
def test_seeds_run_no_code_of_a_sampler(workers, options):
    """Its epoch is read, and where it stands in its instance."""
    theirs = touched_by(torch.utils.data.DataLoader, "sampler", **WORKERS[workers])
    ours = touched_by(ringloader.DataLoader, "sampler", **WORKERS[workers], **options)
    assert ours.get("sampler") == theirs.get("sampler")
    loader = ringloader.DataLoader(Data(), sampler=Order(), collate_fn=draws, **WORKERS[workers], **options)
    first = list(loader)
    loader.sampler.epoch = 5
    second = list(loader)
    loader.sampler.epoch = 3
    assert list(loader) != second and (list(loader) == first or "seed" not in options)


def draws(samples):
    return torch.rand(()).item(), len(samples)


class InWorker(Data):
    """Gives with each sample what was looked up in the worker until then."""

    def __getitem__(self, index):
        # Torch looks once more which kind of dataset it is.
        return index, {name: many for name, many in touched["dataset"].items() if name != "__class__"}


@pytest.mark.parametrize("options", [{}, {"watchdog": 30, "stats": True}])
def test_a_worker_asks_its_dataset_for_no_more(options):
    def seen(loader_class, **options):
        touched.clear()
        return list(loader_class(InWorker(), batch_size=3, num_workers=1, collate_fn=list, **options))

    assert seen(ringloader.DataLoader, **options) == seen(torch.utils.data.DataLoader)


class Raises:
    """A sampler whose attributes raise."""

    def __iter__(self):
        return iter(range(N))

    def __getattr__(self, name):
        raise KeyError(name)

    @property
    def generator(self):
        raise RuntimeError("not ready")

    epoch = rank = sampler = batch_sampler = set_epoch = state_dict = generator


class NoLength(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(N))

    def __len__(self):
        raise RuntimeError("it is a stream")


class Proxy:
    """Has any attribute: itself."""

    def __iter__(self):
        return iter(range(N))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_):
        return self


SAMPLERS = {"raises": Raises, "no length": NoLength, "proxy": Proxy, "mock": lambda: mocked()}


def mocked():
    found = unittest.mock.MagicMock()
    found.__iter__.side_effect = lambda: iter(range(N))
    found.__len__.return_value = N
    return found


@pytest.mark.parametrize("cls", [ringloader.DataLoader, ringloader.StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"seeding": "sample"}, {"prefetch_epochs": True}])
@pytest.mark.parametrize("workers", ["none", "persistent"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_whose_attributes_are_odd(name, workers, options, cls):
    if options.get("prefetch_epochs") and workers == "none":
        pytest.skip("there is no next epoch to begin")
    loader = cls(list(range(N)), batch_size=4, sampler=SAMPLERS[name](), **WORKERS[workers], **options)
    for _ in range(2):
        assert torch.cat([batch for batch in loader]).tolist() == list(range(N))  # noqa: C416


class Named(Dataset):
    """Notes that its text was made."""

    texts = 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index

    def __repr__(self):
        type(self).texts += 1
        return "Named"


@pytest.mark.parametrize("cls", [torch.utils.data.DataLoader, ringloader.DataLoader])
@pytest.mark.parametrize("workers", ["none", "two"])
def test_a_length_that_is_set_in_a_loader_with_indices_warns_of_nothing(recwarn, cls, workers):
    loader = cls(Named(), **WORKERS[workers])
    loader._IterableDataset_len_called = 2
    before = Named.texts
    assert len(list(loader)) == N
    assert Named.texts == before
    assert not [one for one in recwarn if "was reported to be" in str(one.message)]
