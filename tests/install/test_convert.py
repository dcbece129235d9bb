"""One loader that exists, converted: it stays what it was, but for its iterators."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader

import ringloader
from faults.proc import descendants, wait_without_children
from install.loaders import Calling, Naming, NotCalling, Plain, Posing, Reducing, Slotted, Squares, firsts
from parity import harness
from parity.datasets import Samples
from ringloader._features import table
from ringloader._features.table import TABLE, Options

_NAMES = [name for name, about in TABLE.items() if not (about.is_of_states or about.is_torchs)]

Loader = torch.utils.data.DataLoader
TORCHS_ITERATOR = torch_dataloader._MultiProcessingDataLoaderIter
ALL = [[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0], [64.0, 81.0, 100.0, 121.0]]

pytestmark = pytest.mark.rings_only


def squares(loader_class: Any = Loader, **arguments: Any) -> Any:
    return loader_class(Squares(), batch_size=4, num_workers=1, **arguments)


def assert_converted(loader: Any) -> None:
    assert firsts(loader) == ALL
    assert ringloader.report(loader).path == harness.expected_path


def test_the_object_stays_and_so_do_its_attributes() -> None:
    loader = squares(generator=torch.Generator(), shuffle=True)
    loader.of_mine = "mine"
    before = dict(vars(loader))
    assert ringloader.convert(loader) is loader
    after = dict(vars(loader))
    assert after.pop(table.OPTIONS) == Options()
    # Code that makes loaders anew looks there.
    defaults = dataclasses.asdict(Options())
    assert {name: after.pop(name) for name in _NAMES} == {name: defaults[name] for name in _NAMES}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert type(loader) is ringloader.DataLoader


@pytest.mark.parametrize("persistent", [False, True])
def test_it_gives_what_torchs_gives(persistent: bool) -> None:
    def build() -> dict[str, Any]:
        return {
            "dataset": Samples(21),
            "num_workers": 2,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(5),
            "persistent_workers": persistent,
        }

    case = harness.Case(build, epochs=2)
    expected = harness.run(Loader, case)
    actual = harness.run(lambda **arguments: ringloader.convert(Plain(**arguments)), case)  # type: ignore[arg-type]
    harness.assert_same(expected, actual)


@pytest.mark.parametrize("loader_class", [Plain, Calling, Slotted, Reducing, Naming])
def test_a_subclass_stays_one(loader_class: Any) -> None:
    loader = squares(loader_class)
    if loader_class is Slotted:
        loader.more = "more"
    ringloader.convert(loader)
    assert isinstance(loader, loader_class)
    assert isinstance(loader, ringloader.DataLoader)
    assert type(loader).__name__ == loader_class.__name__
    assert type(loader) is type(ringloader.convert(squares(loader_class))), "one class for all of them"
    assert_converted(loader)
    if loader_class is Slotted:
        assert loader.more == "more"
    # Frameworks rebuild loaders in this way.
    again = type(loader)(Squares(), batch_size=4, num_workers=1)
    assert_converted(again)


@pytest.mark.parametrize("loader_class", [Loader, Plain, Calling, Reducing, Naming])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_converted(loader_class: Any, protocol: int) -> None:
    loader = ringloader.convert(squares(loader_class), max_shared_bytes=1 << 24)
    other = pickle.loads(pickle.dumps(loader, protocol))
    assert type(other) is type(loader)
    assert isinstance(other, loader_class)
    if loader_class is Reducing:
        assert other.kept == "kept"
        assert other.batch_size == 4
    elif loader_class is not Naming:
        assert other.max_shared_bytes == 1 << 24
        assert vars(other).keys() == vars(loader).keys()
    if protocol == pickle.DEFAULT_PROTOCOL and loader_class is not Reducing:
        list(other)
        assert ringloader.report(other).path == harness.expected_path


@pytest.mark.parametrize("loader_class", [Loader, Plain, Reducing])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_converted(loader_class: Any, copied: Any) -> None:
    loader = ringloader.convert(squares(loader_class))
    other = copied(loader)
    assert other is not loader
    assert type(other) is type(loader)
    assert (other.dataset is loader.dataset) == (copied is copy.copy)


def test_only_the_given_options_change() -> None:
    loader = ringloader.convert(squares(), max_shared_bytes=1 << 24)
    assert loader.max_shared_bytes == 1 << 24
    ringloader.convert(loader)
    assert loader.max_shared_bytes == 1 << 24
    ringloader.convert(loader, max_shared_bytes=None)
    assert loader.max_shared_bytes is None


def test_an_iterator_that_is_under_way_goes_on() -> None:
    loader = squares()
    iterator = iter(loader)
    taken = [next(iterator)]
    ringloader.convert(loader)
    assert firsts([*taken, *iterator]) == ALL
    assert_converted(loader)


@pytest.mark.parametrize("loader_class", [Loader, Plain, ringloader.DataLoader])
def test_persistent_workers_that_run_are_not_ended_unasked(loader_class: Any) -> None:
    loader = squares(loader_class, persistent_workers=True)
    assert firsts(loader) == ALL
    with pytest.raises(RuntimeError, match=r"persistent workers run already.*loader\._iterator = None"):
        ringloader.convert(loader)
    assert type(loader) is loader_class
    loader._iterator = None
    assert not wait_without_children(10), "as the message says"
    assert_converted(ringloader.convert(loader))


def test_a_loader_goes_with_its_last_reference() -> None:
    loader = ringloader.convert(squares(Plain, persistent_workers=True))
    assert firsts(loader) == ALL
    assert descendants()
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None, "no cycle keeps it, and its workers"
    finally:
        gc.enable()


def test_what_makes_its_own_iterator_cannot_be_converted() -> None:
    with pytest.raises(
        TypeError, match=r"install\.loaders\.NotCalling has a _get_iterator that does not call"
    ):
        ringloader.convert(squares(NotCalling))
    loader = squares()
    loader._get_iterator = lambda: iter(())
    with pytest.raises(TypeError, match="the object has a _get_iterator that does not call"):
        ringloader.convert(loader)
    assert type(loader) is Loader


@pytest.mark.parametrize("wrong", [None, [1, 2], Loader, ringloader.DataLoader], ids=repr)
def test_only_loaders_are_converted(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"convert\(\) takes a torch.utils.data.DataLoader, not "):
        ringloader.convert(wrong)


def test_what_poses_as_a_loader_is_not_converted() -> None:
    loader = squares()
    with pytest.raises(
        TypeError, match=r"takes a torch.utils.data.DataLoader.*convert the loader it stands in"
    ):
        ringloader.convert(Posing(loader))
    assert type(loader) is Loader


def test_wrong_options_change_nothing() -> None:
    loader = squares()
    with pytest.raises(TypeError, match=r"convert\(\) got an unknown option 'shared'"):
        ringloader.convert(loader, shared=1)
    with pytest.raises(ValueError, match="max_shared_bytes must be positive"):
        ringloader.convert(loader, max_shared_bytes=-1)
    assert type(loader) is Loader
    assert not hasattr(loader, "max_shared_bytes")


def test_an_attribute_of_theirs_with_the_name_of_an_option_is_none() -> None:
    loader = squares(Plain)
    loader.device, loader.max_shared_bytes = "theirs", "theirs too"
    options = {"device": "cpu", "max_shared_bytes": 1 << 24}
    assert_converted(ringloader.convert(loader, **options))
    for other in (loader, copy.deepcopy(loader), ringloader.convert(loader)):
        assert (other.device, other.max_shared_bytes) == ("theirs", "theirs too")
        assert table.options_of(other) == Options(**options)
        assert_converted(other)


def test_options_are_checked_with_those_that_the_loader_has() -> None:
    loader = ringloader.convert(squares(), device="cpu")
    assert ringloader.convert(loader, device_transform=len) is loader
    assert table.options_of(loader) == Options(device="cpu", device_transform=len)
    with pytest.raises(ValueError, match="device_transform needs device"):
        ringloader.convert(loader, device=None)
    with pytest.raises(ValueError, match="device_transform needs device"):
        ringloader.convert(squares(), device_transform=len)
    assert table.options_of(loader).device == "cpu"


@pytest.mark.parametrize("loader_class", [Loader, Plain])
def test_a_hook_makes_no_difference(loader_class: Any) -> None:
    with ringloader.installed(max_shared_bytes=1 << 25):
        loader = ringloader.convert(squares(loader_class), max_shared_bytes=1 << 24)
        assert_converted(loader)
    assert_converted(loader)
    assert type(iter(squares(loader_class))) is TORCHS_ITERATOR, "others of the class are as they were"
