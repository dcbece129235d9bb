"""Loaders that a framework makes anew of their attributes, by the signature of their constructor."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from parity.option_cases import CASES
from ringloader._options import kept
from ringloader._options.table import TABLE

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
        return ringloader.DataLoader(data, **arguments, **options)
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
    found = kept.kept_on(anew)
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
        assert anew._ringloader_worker_pool is pool
        assert torch.cat(list(anew)).tolist() == [1, 2]


def test_epochs_that_are_prefetched_are_kept():
    plain = TorchLoader(list(range(8)), num_workers=1, persistent_workers=True)
    anew = made_anew(ringloader.convert(plain, prefetch_epochs=True))
    assert anew._ringloader_prefetch_epochs
    assert torch.cat(list(anew)).tolist() == list(range(8))


def test_a_second_convert_replaces_the_attributes():
    loader = ringloader.convert(TorchLoader([1]), on_error="skip")
    ringloader.convert(loader, on_error="retry")
    assert loader.on_error == "retry"
    assert kept.kept_on(made_anew(loader))["on_error"] == "retry"


def test_an_attribute_of_the_class_stays():
    loader = ringloader.convert(OwnDevice([1], device="mine"), on_error="skip")
    anew = made_anew(loader)
    assert (loader.device, anew.device, anew.on_error) == ("mine", "mine", "skip")
