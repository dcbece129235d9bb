"""The face of the class: its text, and the version."""

import importlib.metadata

import pytest
import torch

import ringloader
from ringloader import DataLoader
from small_datasets import Stream

pytestmark = pytest.mark.rings_only


class Unmeasured(Stream):
    def __len__(self):
        raise ZeroDivisionError


def test_the_version_is_the_packages():
    assert ringloader.__version__ == importlib.metadata.version("ringloader")


def test_the_text_of_a_loader():
    loader = DataLoader(range(8), batch_size=4, num_workers=1)
    assert repr(loader) == "<DataLoader of range (8 samples): batch_size=4, num_workers=1, not iterated yet>"
    list(loader)
    assert repr(loader) == "<DataLoader of range (8 samples): batch_size=4, num_workers=1, path native>"


@pytest.mark.parametrize("dataset", [Stream(range(4)), Unmeasured(range(4))])
def test_of_a_dataset_without_a_length(dataset):
    expected = f"<DataLoader of {type(dataset).__name__}: batch_size=1, num_workers=0, not iterated yet>"
    assert repr(DataLoader(dataset)) == expected


def test_of_a_loader_that_torch_refuses():
    class Kept(DataLoader):
        def __init__(self):
            kept.append(self)
            super().__init__(torch.ones(3), num_workers=-1)

    kept = []
    with pytest.raises(ValueError, match="num_workers"):
        Kept()
    assert "Kept object at" in repr(kept[0])


class Theirs(torch.utils.data.DataLoader):
    """A class with defaults of its own, as other packages have."""

    def __init__(self, dataset, batch_size=2, **others):
        others.setdefault("collate_fn", tuple)
        super().__init__(dataset, batch_size, **others)


@pytest.mark.parametrize("given", [{}, {"batch_size": 3}, {"collate_fn": list}])
def test_defaults_of_a_class_behind_this_one_count(given):
    class Both(DataLoader, Theirs):
        pass

    assert list(Both(range(6), **given)) == list(Theirs(range(6), **given))


class HasItsModels(torch.utils.data.DataLoader):
    """Has a property with the name of an option, which works once the constructor is through."""

    def __init__(self, *arguments, model=None, **others):
        super().__init__(*arguments, **others)
        self.model = model

    @property
    def device(self):
        return self.model.device


def test_a_property_of_a_subclass_may_have_the_name_of_an_option():
    class Ours(HasItsModels, DataLoader):
        pass

    for made in (Ours(range(4)), ringloader.convert(HasItsModels(range(4)))):
        assert [batch.item() for batch in made] == [0, 1, 2, 3]
        assert "device" not in vars(made)
