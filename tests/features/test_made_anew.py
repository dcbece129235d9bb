"""Loaders that a framework makes anew of their attributes, by the signature of their constructor."""

import copy
import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from parity.option_cases import CASES
from ringloader._features import table
from ringloader._features.table import TABLE

pytestmark = pytest.mark.rings_only


def made_anew(loader):
    """Makes a loader from attributes that its signature names, as Lightning; torch's too for ``**kwargs``."""
    attributes = dict(vars(loader))
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = dict(inspect.signature(loader.__init__).parameters)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        parameters.update(inspect.signature(TorchLoader.__init__).parameters)
    given = {name: attributes[name] for name in parameters if name in attributes}
    given.pop("batch_sampler")
    return type(loader)(**given)


class Named(TorchLoader):
    """A loader as programs have them: one argument of its own."""

    def __init__(self, dataset, *, name="train", **kwargs):
        super().__init__(dataset, **kwargs)
        self.name = name


class OwnDevice(TorchLoader):
    """Has an attribute of its own with the name of an option."""

    def __init__(self, dataset, device="mine", **kwargs):
        super().__init__(dataset, **kwargs)
        self.device = device


def loader_of(kind, options):
    arguments = {"batch_size": 2, "num_workers": 2}
    data = list(range(8))
    if kind == "constructed":
        return ringloader.DataLoader(data, **{**arguments, **options})
    plain = (
        Named(data, name="test", **arguments)
        if kind == "converted subclass"
        else TorchLoader(data, **arguments)
    )
    return ringloader.convert(plain, **options)


@pytest.mark.parametrize("kind", ["constructed", "converted", "converted subclass"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_option_is_kept(kind, options):
    anew = made_anew(loader_of(kind, options))
    assert isinstance(anew, ringloader.DataLoader)
    found = table.values_of(anew)
    assert {name: found[name] for name in options} == options
    if kind == "converted subclass":
        assert anew.name == "test"


def test_every_option_has_a_case():
    # A pool is shared by loaders, epochs are prefetched for workers that persist, and the constructor's two
    # are no options of a loader that exists.
    convertible = {name for name, about in TABLE.items() if about.instead is None}
    assert set(CASES) | {"worker_pool", "prefetch_epochs"} == convertible


def test_a_pool_is_kept():
    with ringloader.WorkerPool(2) as pool:
        anew = made_anew(ringloader.convert(TorchLoader([1, 2], num_workers=2), worker_pool=pool))
        assert table.options_of(anew).worker_pool is pool
        assert torch.cat(list(anew)).tolist() == [1, 2]


def test_epochs_that_are_prefetched_are_kept():
    plain = TorchLoader(list(range(8)), num_workers=1, persistent_workers=True)
    anew = made_anew(ringloader.convert(plain, prefetch_epochs=True))
    assert table.options_of(anew).prefetch_epochs
    assert torch.cat(list(anew)).tolist() == list(range(8))


def test_a_second_convert_replaces_the_attributes():
    loader = ringloader.convert(TorchLoader([1]), on_error="skip")
    ringloader.convert(loader, on_error="retry")
    assert loader.on_error == "retry"
    assert table.values_of(made_anew(loader))["on_error"] == "retry"


@pytest.mark.parametrize("kind", ["constructed", "converted"])
def test_the_attribute_of_an_option_cannot_be_set(kind):
    loader = loader_of(kind, {"on_error": "skip"})
    for name, about in TABLE.items():
        if about.is_of_states or about.is_torchs:
            continue
        text = f"{name} of a loader cannot be set.*" + (
            "make a new" if about.instead else rf"convert\(loader, {name}="
        )
        with pytest.raises(AttributeError, match=text):
            setattr(loader, name, "another")
        with pytest.raises(AttributeError, match=text):
            delattr(loader, name)
        # What it is already, as code sets that copies attributes.
        setattr(loader, name, getattr(loader, name))
    assert loader.on_error == "skip" and "on_error" in vars(loader)
    for copied in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert vars(copied)["on_error"] == copied.on_error == "skip"
        with pytest.raises(AttributeError, match="on_error"):
            copied.on_error = "raise"
    assert not hasattr(ringloader.DataLoader, "on_error")
    stateful = ringloader.StatefulDataLoader([1], snapshot_every_n_steps=2)
    for name in ("on_error", "snapshot_every_n_steps"):
        with pytest.raises(AttributeError, match=f"{name} of a loader cannot be set"):
            setattr(stateful, name, 3)


class Before(ringloader.DataLoader):
    def __init__(self, dataset, device="mine", **kwargs):
        self.device = device
        super().__init__(dataset, **kwargs)


class After(ringloader.DataLoader):
    def __init__(self, dataset, device="mine", **kwargs):
        super().__init__(dataset, **kwargs)
        self.device = device

    def move(self, device):
        self.device = device


class Property(ringloader.DataLoader):
    device = property(lambda self: self.place, lambda self, value: setattr(self, "place", value))

    def __init__(self, dataset, device="mine", **kwargs):
        self.place = device
        super().__init__(dataset, **kwargs)


@pytest.mark.parametrize("kind", [Before, After, Property])
def test_an_attribute_that_a_subclass_sets_is_its_own(kind):
    loader = kind([1, 2])
    assert loader.device == "mine" and torch.cat(list(loader)).tolist() == [1, 2]
    loader.device = "another"
    assert loader.device == copy.copy(loader).device == pickle.loads(pickle.dumps(loader)).device == "another"
    assert ringloader.convert(loader, on_error="skip").device == "another"
    if kind is not Property:
        del loader.device
        assert not hasattr(loader, "device")


@pytest.mark.parametrize("kind", ["subclass", "converted subclass"])
def test_an_attribute_that_is_set_on_a_subclass_is_no_option(kind):
    class Moved(ringloader.DataLoader):
        pass

    loader = Moved([1], on_error="skip") if kind == "subclass" else loader_of(kind, {"on_error": "skip"})
    loader.on_error = loader.device = "mine"
    assert (loader.on_error, loader.device) == ("mine", "mine")
    options = table.options_of(loader)
    assert (options.on_error, options.device) == ("skip", None)
    assert ringloader.convert(loader, on_error="retry").on_error == "mine"
    assert table.options_of(loader).on_error == "retry"


def test_an_attribute_of_the_class_stays():
    loader = ringloader.convert(OwnDevice([1], device="mine"), on_error="skip")
    anew = made_anew(loader)
    assert (loader.device, anew.device, anew.on_error) == ("mine", "mine", "skip")
