"""Every torch loader, in every order of installing, wrapping and taking back."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.datapipes.iter import IterableWrapper

import ringloader
from install.loaders import Calling, Hooked, NotCalling, Plain, Posing, Squares, firsts
from parity import harness
from parity.datasets import Samples
from ringloader._core.make_transport import WorkerKind
from ringloader._features.table import DEFAULTS, TABLE, Options
from ringloader._patch import by_name
from ringloader._torch import hook, select_path

Loader = torch.utils.data.DataLoader
TORCHS_OWN = Loader._get_iterator
TORCHS_ITERATOR = torch_dataloader._MultiProcessingDataLoaderIter

pytestmark = pytest.mark.rings_only


class Wrapper:
    """Other code's replacement of ``DataLoader._get_iterator``, which calls what it replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str = "plain") -> None:
        self.asked: list[Any] = []
        self.replaced = Loader._get_iterator

        def theirs(loader: Any) -> Any:
            self.asked.append(loader)
            return self.replaced(loader)

        self.function = functools.wraps(self.replaced)(theirs) if how == "wraps" else theirs
        monkeypatch.setattr(Loader, "_get_iterator", self.function)


def path_of(loader: Any) -> str:
    """Iterates, and tells the path."""
    assert firsts(loader) == [[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0], [64.0, 81.0, 100.0, 121.0]]
    return str(ringloader.report(loader).path)


def squares(loader_class: Any = Loader, workers: int = 1, **arguments: Any) -> Any:
    return loader_class(Squares(), batch_size=4, num_workers=workers, **arguments)


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The budgets that transports were made with."""
    found: list[int | None] = []
    original = WorkerKind.transport

    def transport(kind: WorkerKind, loader: Any, options: Options, *rest: Any) -> Any:
        found.append(options.max_shared_bytes)
        return original(kind, loader, options, *rest)

    monkeypatch.setattr(WorkerKind, "transport", transport)
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_of_any_class_gives_what_torchs_gives(shuffle: bool, persistent: bool) -> None:
    def build() -> dict[str, Any]:
        return {
            "dataset": Samples(21),
            "batch_size": 4,
            "num_workers": 2,
            "shuffle": shuffle,
            "persistent_workers": persistent,
        }

    case = harness.Case(build, epochs=2)
    expected = harness.run(Loader, case)
    with ringloader.installed():
        # The harness asserts the path of any class but torch's.
        actual = harness.run(Plain, case)
    harness.assert_same(expected, actual)


def test_torchs_own_class_too() -> None:
    loader = squares()
    with ringloader.installed():
        assert path_of(loader) == harness.expected_path
        iterator = iter(loader)
        assert isinstance(iterator, TORCHS_ITERATOR)
        assert ringloader.report(iterator).path == harness.expected_path
    assert firsts(iterator)[0] == [0.0, 1.0, 4.0, 9.0], "an iterator that exists goes on"
    assert type(iter(loader)) is TORCHS_ITERATOR


def test_without_workers_too() -> None:
    with ringloader.installed():
        loader = squares(workers=0)
        assert path_of(loader) == "single-process"
        assert isinstance(iter(loader), torch_dataloader._SingleProcessDataLoaderIter)


def test_a_class_that_goes_on_to_torchs_is_reached() -> None:
    with ringloader.installed():
        loader = squares(Calling)
        assert path_of(loader) == harness.expected_path
        assert ringloader.report(iter(loader).inner).path == harness.expected_path


class NotCallingEither(NotCalling):
    """Reaches a class that does not call torch's."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


@pytest.mark.parametrize("kind", [NotCalling, NotCallingEither])
def test_a_class_that_does_not_is_left_alone(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    theirs = NotCalling._get_iterator
    reason = "install.loaders.NotCalling has a _get_iterator that does not call torch's"
    with ringloader.installed(), caplog.at_level("WARNING", "ringloader"):
        loader = squares(kind)
        assert type(iter(loader)) is TORCHS_ITERATOR
        report = ringloader.report(loader)
        assert (report.path, report.reason, report.counters) == ("torch", reason, {})
        assert NotCalling._get_iterator is theirs
    assert not caplog.records


class Decorated(Loader):
    @torch.no_grad()
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


def test_a_decorated_method_that_goes_on_to_torchs_is_reached(caplog: pytest.LogCaptureFixture) -> None:
    with ringloader.installed(), caplog.at_level("WARNING", "ringloader"):
        assert path_of(squares(Decorated)) == harness.expected_path
    assert path_of(ringloader.convert(squares(Decorated))) == harness.expected_path
    assert not caplog.records


def test_what_makes_its_iterator_itself_is_torchs_without_install_too() -> None:
    loader = squares()
    loader._get_iterator = lambda: TORCHS_ITERATOR(loader)
    assert ringloader.report(loader).reason == "the object has a _get_iterator that does not call torch's"


def test_the_path_of_what_stands_in_front_of_a_loader() -> None:
    with ringloader.installed():
        assert path_of(Posing(squares())) == harness.expected_path


def test_an_iterator_on_the_object_takes_effect() -> None:
    loader = squares()
    loader._get_iterator = lambda: iter(["theirs"])
    with ringloader.installed():
        assert list(loader) == ["theirs"]


def test_installed_twice_replaces_the_options(budgets: list[int | None]) -> None:
    ringloader.install(max_shared_bytes=1 << 24)
    list(squares())
    ringloader.install(max_shared_bytes=1 << 25)
    list(squares())
    ringloader.install()
    list(squares())
    assert budgets == [1 << 24, 1 << 25, None]
    ringloader.uninstall()
    assert Loader._get_iterator is TORCHS_OWN, "there was one hook"
    ringloader.uninstall()


def test_nested_blocks_restore_the_options(budgets: list[int | None]) -> None:
    ringloader.install(max_shared_bytes=1 << 24)
    with ringloader.installed(max_shared_bytes=1 << 25):
        with pytest.raises(KeyError), ringloader.installed(max_shared_bytes=1 << 26):
            list(squares())
            raise KeyError
        list(squares())
        ringloader.uninstall()
        list(squares())
    list(squares())
    ringloader.uninstall()
    assert budgets == [1 << 26, 1 << 25, 1 << 24]


def test_as_a_decorator() -> None:
    @ringloader.installed()
    def iterated() -> str:
        return path_of(squares())

    assert iterated() == iterated() == harness.expected_path
    assert Loader._get_iterator is TORCHS_OWN


@pytest.mark.parametrize("how", ["plain", "wraps"])
def test_wrapped_before(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    theirs = Wrapper(monkeypatch, how)
    loader = squares()
    with ringloader.installed():
        assert path_of(loader) == "torch"
        said = f"torch.utils.data.DataLoader._get_iterator was replaced by {__name__}"
        assert ringloader.report(loader).reason == said
    assert theirs.asked == [loader]
    assert Loader._get_iterator is theirs.function


@pytest.mark.parametrize("how", ["plain", "wraps"])
def test_wrapped_after(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    loader = squares()
    ringloader.install()
    hook = Loader._get_iterator
    theirs = Wrapper(monkeypatch, how)
    assert path_of(loader) == harness.expected_path
    assert theirs.asked == [loader]
    # Taken back while it is buried: theirs stays, and gets torch's iterators.
    ringloader.uninstall()
    assert Loader._get_iterator is theirs.function
    assert type(iter(loader)) is TORCHS_ITERATOR
    assert theirs.asked == [loader, loader]
    # The tools put back what they found, which is as good as torch's own, and can be used again.
    monkeypatch.undo()
    assert Loader._get_iterator is hook
    assert type(iter(loader)) is TORCHS_ITERATOR
    with ringloader.installed():
        assert Loader._get_iterator is hook, "not one on top of the other"
        assert path_of(loader) == harness.expected_path
    assert Loader._get_iterator is TORCHS_OWN


@pytest.mark.parametrize("how", ["plain", "wraps"])
def test_wrapped_between_two_installs(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    loader = squares()
    ringloader.install()
    theirs = Wrapper(monkeypatch, how)
    ringloader.install()
    assert path_of(loader) == harness.expected_path, "by the hook beneath theirs, and noted as such"
    assert theirs.asked == [loader]
    ringloader.uninstall()
    assert Loader._get_iterator is theirs.function
    assert type(iter(loader)) is TORCHS_ITERATOR
    monkeypatch.undo()
    ringloader.install()
    ringloader.uninstall()


def test_replaced_after_without_calling_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringloader.installed():
        monkeypatch.setattr(Loader, "_get_iterator", lambda _self: iter(["theirs"]))
        assert list(squares()) == list(squares(ringloader.DataLoader)) == ["theirs"]
        monkeypatch.undo()


def test_other_code_puts_torchs_own_back() -> None:
    ringloader.install()
    Loader._get_iterator = TORCHS_OWN
    assert type(iter(squares())) is TORCHS_ITERATOR
    ringloader.install()
    assert path_of(squares()) == harness.expected_path
    ringloader.uninstall()
    assert Loader._get_iterator is TORCHS_OWN


@pytest.mark.parametrize("case", ["alone", "no workers", "wrapped before", "wrapped after"])
def test_ringloaders_own_class_with_and_without_the_hook(
    monkeypatch: pytest.MonkeyPatch, case: str, budgets: list[int | None]
) -> None:
    seen = []
    for with_hook in (False, True):
        with monkeypatch.context() as patch:
            theirs = Wrapper(patch) if case == "wrapped before" else None
            if with_hook:
                ringloader.install(max_shared_bytes=1 << 25)
            theirs = Wrapper(patch) if case == "wrapped after" else theirs
            loader = squares(
                ringloader.DataLoader, workers=0 if case == "no workers" else 1, max_shared_bytes=1 << 24
            )
            seen.append((path_of(loader), len(theirs.asked) if theirs else 0, tuple(budgets)))
            budgets.clear()
        ringloader.uninstall()
    without, with_one = {
        "alone": ((harness.expected_path, 0), (harness.expected_path, 0)),
        "no workers": (("single-process", 0), ("single-process", 0)),
        "wrapped before": (("torch", 1), ("torch", 1)),
        # The wrapper runs around our iterator, where there is a hook beneath it.
        "wrapped after": (("torch", 1), (harness.expected_path, 1)),
    }[case]
    assert [one[:2] for one in seen] == [without, with_one]
    for path, _, made_with in seen:
        assert made_with == (() if path in ("torch", "single-process") else (1 << 24,)), (
            "by the loader's own options"
        )


@pytest.mark.parametrize("how", ["plain", "wraps"])
def test_a_wrapper_around_the_hook_gets_our_iterator(
    monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select_path, "_logged", set())
    loader = squares(ringloader.DataLoader)
    with ringloader.installed():
        theirs = Wrapper(monkeypatch, how)
        with caplog.at_level("WARNING", "ringloader"):
            assert path_of(loader) == harness.expected_path
        assert theirs.asked == [loader]
        assert not caplog.records, "nothing falls back"
        ringloader.uninstall()
        assert path_of(loader) == "torch"
        (record,) = caplog.records
        assert record.message.startswith(
            f"ringloader: torch.utils.data.DataLoader._get_iterator was replaced by {__name__}, so torch"
        )
        assert theirs.asked == [loader, loader]
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_shared_byte": 1}, TypeError, "unknown option 'max_shared_byte'; there are: stateful, "),
        ({"max_shared_bytes": "1G"}, TypeError, "max_shared_bytes must be an int or None, not '1G'"),
        ({"max_shared_bytes": 0}, ValueError, "max_shared_bytes must be positive, not 0"),
    ],
)
@pytest.mark.parametrize("install", [ringloader.install, ringloader.installed])
def test_wrong_options_install_nothing(
    install: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        install(**options)
    assert hook.current() is None


def test_the_options_are_the_loaders_own_arguments() -> None:
    torchs, ours = (
        inspect.signature(loader_class.__init__).parameters
        for loader_class in (torch.utils.data.DataLoader, ringloader.DataLoader)
    )
    added = {name: ours[name].default for name in ours if name not in torchs}
    others = {name for name, about in TABLE.items() if about.is_of_states or about.is_torchs}
    assert added == {name: value for name, value in DEFAULTS.items() if name not in others}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_forked_children_inherit_it_and_spawned_ones_do_not(start: str) -> None:
    loader = Loader(Hooked(), num_workers=1, multiprocessing_context=start)
    with ringloader.installed():
        assert [batch.tolist() for batch in loader] == [[start == "fork"]]
        assert ringloader.report(loader).path == harness.expected_path


def test_datapipes_too() -> None:
    with ringloader.installed():
        loader = Loader(IterableWrapper(range(4)), num_workers=1)
        assert [batch.tolist() for batch in loader] == [[0], [1], [2], [3]]
        assert ringloader.report(loader).path == harness.expected_path


@pytest.mark.parametrize("name", ["install", "convert"])
def test_the_list_of_options_has_all_that_are_taken(name: str) -> None:
    call = {"install": ringloader.install, "convert": functools.partial(ringloader.convert, Loader([1]))}[
        name
    ]
    with pytest.raises(TypeError, match="there are: ") as caught:
        call(num_worker=2)
    listed = str(caught.value).partition("there are: ")[2].split(", ")
    taken = [name for name, about in TABLE.items() if about.instead is None]
    assert listed == [*(["stateful"] if name == "install" else []), *taken]


@pytest.mark.parametrize(("name", "instead"), by_name.REMOVED.items())
def test_a_name_that_was_removed_is_an_error_that_names_the_other_one(name: str, instead: str) -> None:
    ways = [ringloader.install, ringloader.installed, functools.partial(ringloader.convert, Loader([1]))]
    for call in (*ways, lambda **given: by_name.from_text(f"{name}={given[name]}")):
        with pytest.raises(TypeError, match=f"has no option '{name}' any more: ") as caught:
            call(**{name: True})
        assert str(caught.value).endswith(instead)
    for cls in (ringloader.DataLoader, ringloader.StatefulDataLoader):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            cls([1], **{name: True})
