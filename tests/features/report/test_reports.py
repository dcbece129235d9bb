"""All loaders of the process can be asked for, which keeps none of them alive."""

from __future__ import annotations

import collections
import dataclasses
import gc
import inspect
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import dataloader as torch_dataloader

import ringloader
from ringloader._core import notes
from ringloader._features.report import at_exit, report
from small_datasets import Numbers, Stream

pytestmark = pytest.mark.rings_only

Loader = torch.utils.data.DataLoader
OURS = Path(ringloader.__file__).parent

HOW: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "persistent_workers": True, "prefetch_epochs": True},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "thread", "persistent_workers": True},
]
PATHS = ["single-process", "native", "native", "native", "threads", "threads"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has iterated no loader yet."""
    monkeypatch.setattr(notes, "_loaders", collections.deque())


@pytest.fixture
def is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report at exit is asked for."""
    monkeypatch.setattr(at_exit, "mode", at_exit.ONE)


class Trainer:
    """Keeps its loader to itself, as frameworks do."""

    def __init__(self, loader_class: Any = ringloader.DataLoader, **how: Any) -> None:
        self.__loader = loader_class(Numbers(12), batch_size=2, **how)

    def fit(self, most: int | None = None) -> int:
        done = 0
        for _ in self.__loader:
            done += 1
            if done == most:
                break
        return done


def test_nothing_is_reported_of_loaders_that_were_not_iterated() -> None:
    trainer = Trainer()
    assert ringloader.reports() == []
    assert trainer.fit() == 6
    assert len(ringloader.reports()) == 1


@pytest.mark.parametrize(("how", "path"), list(zip(HOW, PATHS, strict=True)))
def test_a_hidden_loader_is_reported_with_all_its_batches(how: dict[str, Any], path: str) -> None:
    trainer = Trainer(**how)
    assert [trainer.fit(), trainer.fit(most=2), trainer.fit()] == [6, 2, 6]
    (found,) = ringloader.reports()
    assert (found.path, found.loader) == (path, "ringloader.dataloader.DataLoader")
    assert (found.is_alive, found.batches) == (True, 14)
    assert [found.used_at, found.dataset, found.starting, found.seconds] == [None] * 4
    assert (found.waited is None) == (path == "single-process")
    assert found.counters.get("batches", 6) == 6
    gc.disable()
    try:
        del trainer
        (gone,) = ringloader.reports()
    finally:
        gc.enable()
    assert gone == dataclasses.replace(found, is_alive=False, counters={}, waited=gone.waited)


@pytest.mark.parametrize("how", HOW)
def test_an_epoch_that_runs_is_counted(how: dict[str, Any]) -> None:
    loader = ringloader.DataLoader(Numbers(12), batch_size=2, **how)
    iterator, other = iter(loader), None
    next(iterator)
    if not how.get("persistent_workers"):
        other = iter(loader)
        next(other)
    next(iterator)
    (found,) = ringloader.reports()
    assert found.batches == (2 if other is None else 3)


def test_they_come_in_the_order_of_first_use() -> None:
    first, second = Trainer(), Trainer(num_workers=1)
    second.fit()
    first.fit()
    second.fit()
    assert [(one.path, one.batches) for one in ringloader.reports()] == [
        ("native", 12),
        ("single-process", 6),
    ]


class Late(Stream):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            time.sleep(0.05)
            yield sample


@pytest.mark.parametrize("how", [HOW[1], HOW[4]])
def test_the_time_is_measured_in_which_no_batch_was_ready(how: dict[str, Any]) -> None:
    samples = [torch.zeros(1)] * 6
    slow = ringloader.DataLoader(Late(samples), batch_size=None, **how | {"num_workers": 1})
    assert len(list(slow)) == 6
    (found,) = ringloader.reports()
    assert found.waited is not None and found.waited > 0.2
    quick = ringloader.DataLoader(samples, batch_size=None, prefetch_factor=6, **how | {"num_workers": 1})
    iterator = iter(quick)
    next(iterator)
    time.sleep(1.0)
    before = ringloader.reports()[1].waited
    assert [next(iterator) for _ in range(5)] == samples[1:]
    assert ringloader.reports()[1].waited == before, "all were ready"


def of_reports(frame_of: Any) -> set[str]:
    """Names of functions that a call runs of the reports and of the notes for them."""
    files = {str(OURS / "_core/notes.py"), *map(str, (OURS / "_features/report").iterdir())}
    found = set()

    def trace(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            found.add(frame.f_code.co_name)

    sys.setprofile(trace)
    try:
        frame_of()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("how", HOW)
def test_a_batch_costs_nothing(how: dict[str, Any]) -> None:
    iterator = iter(ringloader.DataLoader(Numbers(12), batch_size=2, **how))
    assert of_reports(lambda: [next(iterator) for _ in range(4)]) == set()


@pytest.mark.usefixtures("is_asked")
def test_a_batch_is_timed_where_a_report_is_asked_for() -> None:
    iterator = iter(ringloader.DataLoader(Numbers(12), batch_size=2))
    assert of_reports(lambda: next(iterator)) == {"timed", "_passed"}


class Sampler(torch.utils.data.SequentialSampler):
    pass


@pytest.mark.parametrize("is_asked_for", [False, True])
@pytest.mark.parametrize("how", HOW[:3] + HOW[4:])
def test_nothing_is_kept_alive(
    how: dict[str, Any], is_asked_for: bool, request: pytest.FixtureRequest
) -> None:
    if is_asked_for:
        request.getfixturevalue("is_asked")
    dataset = Numbers(12)
    sampler = Sampler(dataset)
    loader = ringloader.DataLoader(dataset, batch_size=2, sampler=sampler, **how)
    iterator = iter(loader)
    next(iterator)
    before = ringloader.reports()
    kept = [weakref.ref(one) for one in (dataset, sampler, loader, iterator)]
    gc.collect()
    gc.disable()
    try:
        del dataset, sampler, loader, iterator
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()
    assert [one.batches for one in ringloader.reports()] == [one.batches for one in before] == [1]


class Owner:
    """Has its loader, and the functions and the dataset of that."""

    def __init__(self, how: dict[str, Any]) -> None:
        self.dataset = Numbers(12)
        self.dataset.owner = self  # type: ignore[attr-defined]
        given = {name: self.function if value == "function" else value for name, value in how.items()}
        self.loader = ringloader.DataLoader(self.dataset, batch_size=2, num_workers=2, **given)

    def function(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"on_error": "function"},
        {"on_error": "function", "persistent_workers": True},
        {"on_error": "function", "worker_method": "thread"},
        {"worker_reset_fn": "function", "persistent_workers": True},
        {"restart_workers": 1, "persistent_workers": True},
        {"sample_timeout": 60, "persistent_workers": True},
        {"collate_fn": "function", "restart_workers": 1, "persistent_workers": True},
    ],
    ids=str,
)
def test_nothing_is_kept_alive_that_refers_to_its_loader(how: dict[str, Any]) -> None:
    owner = Owner(how)
    iterator = iter(owner.loader)
    next(iterator)
    workers = iterator._workers
    kept = weakref.ref(owner)
    del owner, iterator
    gc.collect()
    assert kept() is None
    assert not any(worker.is_alive() for worker in workers)


def test_persistent_threads_keep_a_loader_to_which_their_dataset_refers() -> None:
    """Until it is shut down: threads that run have the dataset. Processes have a copy."""
    kept = {}
    for method in ("multiprocessing", "thread"):
        owner = Owner({"worker_method": method, "persistent_workers": True})
        next(iter(owner.loader))
        kept[method] = weakref.ref(owner)
        del owner
    gc.collect()
    assert kept["multiprocessing"]() is None
    owner = kept["thread"]()
    assert owner is not None
    owner.loader.shutdown()
    del owner
    gc.collect()
    assert kept["thread"]() is None


def test_the_oldest_fall_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_loaders", collections.deque(maxlen=3))
    for most in (1, 2, 3, 4):
        Trainer().fit(most)
    assert [one.batches for one in ringloader.reports()] == [2, 3, 4]


class NotCalling(Loader[Any]):
    def _get_iterator(self) -> Any:
        return torch_dataloader._SingleProcessDataLoaderIter(self)


def test_a_class_that_makes_its_iterators_itself_is_not_listed() -> None:
    trainer = Trainer(NotCalling)
    with ringloader.installed():
        trainer.fit()
    assert ringloader.reports() == []


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("loader_class", [ringloader.DataLoader, Loader])
def test_torchs_path_is_counted_where_an_iterator_of_ours_stands_in_front(
    monkeypatch: pytest.MonkeyPatch, loader_class: Any, persistent: bool
) -> None:
    monkeypatch.setenv("RINGLOADER", "off")
    trainer = Trainer(loader_class, num_workers=1, persistent_workers=persistent)
    with ringloader.installed():
        trainer.fit()
        trainer.fit(most=2)
    (found,) = ringloader.reports()
    assert (found.path, found.reason) == ("torch", "RINGLOADER=off is set")
    assert (found.batches, found.waited) == (None if loader_class is Loader else 8, None)


@pytest.mark.usefixtures("is_asked")
@pytest.mark.parametrize("loader_class", [ringloader.DataLoader, Loader])
def test_all_is_counted_where_a_report_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, loader_class: Any
) -> None:
    with ringloader.installed():
        for workers, off in ((0, ""), (1, ""), (1, "off")):
            monkeypatch.setenv("RINGLOADER", off)
            trainer = Trainer(loader_class, num_workers=workers, persistent_workers=workers > 0)
            trainer.fit()
            trainer.fit(most=2)
    found = ringloader.reports()
    assert [one.path for one in found] == ["single-process", "native", "torch"]
    for one in found:
        assert one.batches == 8
        assert one.waited is not None and one.seconds is not None and 0 < one.waited < one.seconds
        assert one.starting is not None and 0 < one.starting < one.seconds
        assert one.used_at is not None and one.used_at.startswith(f"{__file__}:")
        assert one.dataset == "Numbers (12 samples)"
    del trainer
    gone = ringloader.reports()
    assert [one.is_alive for one in gone] == [False] * 3
    assert [one.counters for one in gone] == [one.counters for one in found]
    assert gone[1].counters["batches"] >= 2
    line = str(found[2])
    where = f"{report._short(found[2].used_at or '')}: {found[2].loader} of Numbers (12 samples): "
    assert line.startswith(f"{where}torch, because ")
    assert "RINGLOADER=off is set; 8 batches in " in line


@pytest.mark.usefixtures("is_asked")
def test_a_line_is_one_of_the_program() -> None:
    scope: dict[str, Any] = {"DataLoader": ringloader.DataLoader}
    code = "\n\ndef fit():\n    list(DataLoader([1]))\n"
    exec(compile(code, "/x/site-packages/framework/trainer.py", "exec"), scope)
    exec(compile("\n\nfit()\n", "/x/train.py", "exec"), scope)
    (found,) = ringloader.reports()
    assert found.used_at == "/x/train.py:3"


def test_loaders_of_one_place_and_path_share_a_line() -> None:
    one = report.LoaderReport("native", "r", {}, "a.L", False, 3, 0.25, 0.125, 1.5, "/x/t.py:7", "Squares")
    other = dataclasses.replace(one, batches=1)
    torchs = report.LoaderReport("torch", "it is so", {}, "a.L", True, *[None] * 6)
    rates = "(1.3 a second); waited 0.500 s; starts 0.250 s"
    assert report.lines((each, None) for each in (one, torchs, other)) == [
        f"/x/t.py:7: a.L of Squares (2 loaders): native; 4 batches in 3.000 s {rates}",
        "a.L: torch, because it is so; batches not counted",
    ]
    rates = "(0.7 a second); waited 0.250 s; starts 0.125 s"
    assert str(other) == f"/x/t.py:7: a.L of Squares: native; 1 batch in 1.500 s {rates}"
    single = dataclasses.replace(torchs, path="single-process", batches=0)
    assert str(single) == "a.L: single-process; 0 batches"


def test_a_forked_child_has_loaders_of_its_own() -> None:
    trainer = Trainer()
    trainer.fit()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        counts = [len(ringloader.reports())]
        trainer.fit(most=4)
        counts += [one.batches or 0 for one in ringloader.reports()]
        os.write(writing, bytes(counts))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == bytes([0, 4])
    os.close(reading)
    os.close(writing)
    assert [one.batches for one in ringloader.reports()] == [6]


def test_what_is_left_aside_stands_in_the_reason() -> None:
    loader: Any = Loader(Numbers(4))
    with ringloader.installed(main_prefetch=1):
        list(loader)
    (found,) = ringloader.reports()
    assert found.reason == ringloader.report(loader).reason
    assert "main_prefetch" in found.reason


class SlowToStart(Numbers):
    """Takes long where a worker, or an epoch, begins."""

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(0.3)
        return vars(self)


# It compares two clocks, which a busy machine parts.
@pytest.mark.slow
@pytest.mark.usefixtures("is_asked")
@pytest.mark.parametrize("off", ["", "off"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_time_in_iter_is_named(persistent: bool, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start there."""
    monkeypatch.setenv("RINGLOADER", off)
    loader = ringloader.DataLoader(
        SlowToStart(12),
        batch_size=2,
        num_workers=1,
        persistent_workers=persistent,
        multiprocessing_context="spawn",
    )
    begun, in_iter = time.monotonic(), 0.0
    for _ in range(2):
        before = time.monotonic()
        iterator = iter(loader)
        in_iter += time.monotonic() - before
        for _ in iterator:
            pass
        del iterator
    took = time.monotonic() - begun
    (found,) = ringloader.reports()
    assert found.starting is not None and found.seconds is not None
    assert in_iter - 0.1 < found.starting <= in_iter
    assert found.starting > (0.3 if persistent else 0.6)
    assert found.starting < found.seconds <= took


def test_nothing_that_a_program_can_look_at_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at() -> list[Any]:
        init: Any = Loader.__init__
        return [
            init,
            init.__code__.co_varnames,
            init.__defaults__,
            init.__kwdefaults__,
            inspect.getfullargspec(init),
            inspect.signature(init, follow_wrapped=False),
            sorted(vars(Loader)),
        ]

    before = looked_at()
    monkeypatch.setattr(at_exit, "mode", at_exit.ONE)
    with ringloader.installed():
        loader: Any = Loader([1, 2])
        list(loader)
        assert looked_at() == before
    (found,) = ringloader.reports()
    assert found.used_at is not None and found.used_at.startswith(f"{__file__}:")
