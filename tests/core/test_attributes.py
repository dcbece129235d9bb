"""Objects of the program whose attributes raise anything, wherever an option looks at them."""

import pytest
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import ringloader
from ringloader import CachedDataset
from ringloader._common import attributes

pytestmark = pytest.mark.rings_only


class Fields(Dataset):
    """Finds its attributes in a dict, whose error is no ``AttributeError``."""

    def __init__(self, **fields):
        self.__dict__["fields"] = fields

    def __getattr__(self, name):
        return self.__dict__["fields"][name]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Late(Dataset):
    """Has properties that are not ready."""

    @property
    def set_epoch(self):
        raise RuntimeError("not yet")

    state_dict = load_state_dict = set_epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def test_what_raises_is_not_there():
    fields = Fields(found=len)
    assert attributes.has_method(fields, "found")
    assert not attributes.has_method(fields, "other")
    assert attributes.attribute(fields, "other", 3) == 3 and attributes.attribute(fields, "found") is len
    assert not attributes.has_method(Late(), "set_epoch")
    assert attributes.has_method(fields, "__getitem__")


@pytest.mark.parametrize("dataset", [Fields(), Late()], ids=["__getattr__", "property"])
def test_a_dataset_is_cached(dataset):
    cached = CachedDataset(dataset)
    assert [cached[index] for index in range(8)] == list(range(8))
    assert list(TorchLoader(cached, batch_size=None)) == list(range(8))


@pytest.mark.parametrize("dataset", [Fields(), Late()], ids=["__getattr__", "property"])
def test_a_loader_is_checked(dataset):
    loader = TorchLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    assert type(ringloader.convert(loader, prefetch_epochs=True)) is ringloader.DataLoader


def test_a_source_is_sharded():
    class Source(Fields):
        def __iter__(self):
            return iter(range(4))

    assert list(ringloader.Sharded(Source())) == list(range(4))


def test_a_part_of_a_batch_is_not_moved():
    part = Fields()
    loader = ringloader.DataLoader([part], batch_size=None, collate_fn=lambda found: found, device="cpu")
    assert next(iter(loader)) is part
