"""The rules which options exclude each other: each one, by whoever takes options."""

from __future__ import annotations

import re
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import ringloader
import ringloader._features.all as features
from ringloader._features import table
from ringloader._features.rules import Facts, broken
from ringloader._features.table import DEFAULTS, RULES, TABLE, Options
from ringloader._patch import by_name
from ringloader._torch import select_path
from small_datasets import Stream

pytestmark = pytest.mark.rings_only


class Saved(torch.utils.data.Dataset):
    """A dataset with a state."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Told(torch.utils.data.Dataset):
    """A dataset with a number of an epoch."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        pass


def told(*_):
    """Stands for any function that an option takes."""


NUMBERS = list(range(4))
POOL = ringloader.WorkerPool(2)


class Elsewhere(ringloader.WorkerPool):
    """Stands for a pool whose workers are on other machines, which needs Ray."""

    _is_remote = True


ELSEWHERE = Elsewhere(2)
PERSISTENT = {"num_workers": 1, "persistent_workers": True}


class Case(NamedTuple):
    """Breaks one rule: options, torch's arguments, the beginning of the error and the end of it."""

    options: dict[str, Any]
    arguments: dict[str, Any]
    text: str
    remedy: str
    stateful: bool = False


def dispatch():
    return {"dataset": ringloader.Dispatch(range(4)), "batch_size": None, "num_workers": 1}


# By the option and the words of the rule.
CASES = {
    ("worker_method", "with `max_shared_bytes`"): Case(
        {"worker_method": "thread", "max_shared_bytes": 4096},
        {},
        "worker_method='thread' and max_shared_bytes=4096 do not go together: threads need no",
        "leave one of them out",
    ),
    ("worker_method", "with `main_prefetch`"): Case(
        {"worker_method": "thread", "main_prefetch": 2},
        {},
        "worker_method='thread' and main_prefetch=2 do not go together: batches of threads",
        "leave one of them out",
    ),
    ("worker_method", "with `worker_pool`"): Case(
        {"worker_method": "thread", "worker_pool": POOL},
        {},
        "worker_method='thread' and worker_pool=ringloader.WorkerPool(2) do not go together: a pool has",
        "leave one of them out",
    ),
    ("worker_method", "with `sample_timeout`"): Case(
        {"worker_method": "thread", "sample_timeout": 2.0},
        {},
        "worker_method='thread' and sample_timeout=2.0 do not go together: a thread cannot be killed",
        "leave one of them out",
    ),
    ("worker_method", "with `restart_workers`"): Case(
        {"worker_method": "thread", "restart_workers": 2},
        {},
        "worker_method='thread' and restart_workers=2 do not go together: a thread is lost",
        "leave one of them out",
    ),
    ("restart_workers", "with `Workers` on a cluster"): Case(
        {"restart_workers": 2, "worker_pool": ELSEWHERE},
        {},
        "restart_workers=2 and worker_pool=ringloader.WorkerPool(2) do not go together: lost workers of",
        "set retries= of Workers instead",
    ),
    ("sample_timeout", "with `Workers` on a cluster"): Case(
        {"sample_timeout": 2.0, "worker_pool": ELSEWHERE},
        {},
        "sample_timeout=2.0 and worker_pool=ringloader.WorkerPool(2) do not go together: only workers of",
        "leave sample_timeout out, or use timeout",
    ),
    ("device_transform", "without `device`"): Case(
        {"device_transform": told}, {}, "device_transform needs device", "that its batches are to be on"
    ),
    ("main_prefetch", "with `device`"): Case(
        {"main_prefetch": 2, "device": "cpu"},
        {},
        "main_prefetch=2 and device='cpu' do not go together",
        "say with device_prefetch how many",
    ),
    ("worker_task", 'with another `seeding` than `"sample"`'): Case(
        {"worker_task": "sample", "seeding": "batch"},
        {},
        "worker_task='sample' and seeding='batch' do not go together",
        "leave seeding out",
    ),
    ("worker_concurrency", 'with `seeding="batch"`'): Case(
        {"worker_concurrency": 2, "seeding": "batch"},
        {},
        "worker_concurrency=2 and seeding='batch' do not go together",
        "pass seeding='sample'",
    ),
    ("worker_task", "with `Workers` on a cluster"): Case(
        {"worker_task": "sample", "worker_pool": ELSEWHERE},
        {},
        "worker_task='sample' and worker_pool=ringloader.WorkerPool(2) do not go together",
        "leave worker_task out",
    ),
    ("num_workers", 'with `seeding="torch"` or `"epoch"`'): Case(
        {"num_workers": "auto", "seeding": "torch"},
        {},
        "num_workers='auto' and seeding='torch' do not go together: the numbers of a sample",
        "leave seeding out",
    ),
    ("num_workers", "with `Workers` on a cluster"): Case(
        {"num_workers": "auto", "worker_pool": ELSEWHERE},
        {},
        "num_workers='auto' and worker_pool=ringloader.WorkerPool(2) do not go together: idle processors",
        "pass a number",
    ),
    ("seed", "without `worker_reset_fn` or `seeding`"): Case(
        {"seed": 3}, {}, "seed=3 has no effect without worker_reset_fn", "pass torch's generator"
    ),
    ("max_errors", "without `on_error`"): Case(
        {"max_errors": 3, "on_error": ringloader.Retry()},
        {},
        "max_errors=3 has no effect with on_error=Retry(times=3, backoff=0.1, then='raise')",
        "pass on_error='skip', or Retry(then=...)",
    ),
    ("worker_pool", "with `persistent_workers`, unless with `prefetch_epochs`"): Case(
        {"worker_pool": POOL},
        PERSISTENT,
        "persistent_workers=True does not go with worker_pool",
        "leave persistent_workers out, the pool keeps them",
    ),
    ("worker_pool", "with `multiprocessing_context`"): Case(
        {"worker_pool": POOL},
        {"num_workers": 1, "multiprocessing_context": "fork"},
        "multiprocessing_context='fork' does not go with worker_pool",
        "pass start_method to WorkerPool instead",
    ),
    ("worker_pool", "with more workers than it has"): Case(
        {"worker_pool": POOL},
        {"num_workers": 3},
        "num_workers=3 is more than the 2 processes of worker_pool",
        "or make a larger WorkerPool",
    ),
    ("worker_pool", "with a `Dispatch`"): Case(
        {"worker_pool": POOL},
        dispatch(),
        "worker_pool=ringloader.WorkerPool(2) and a Dispatch as dataset do not go together",
        "and say num_workers",
    ),
    ("main_prefetch", "without workers"): Case(
        {"main_prefetch": 2}, {}, "main_prefetch=2 and num_workers=0 do not go together", "use num_workers=1"
    ),
    ("main_prefetch", "with `pin_memory`"): Case(
        {"main_prefetch": 2},
        {"num_workers": 1, "pin_memory": True},
        "main_prefetch=2 and pin_memory=True do not go together",
        "leave main_prefetch out",
    ),
    ("worker_method", "with `multiprocessing_context`"): Case(
        {"worker_method": "thread"},
        {"num_workers": 1, "multiprocessing_context": "fork"},
        "worker_method='thread' and multiprocessing_context='fork' do not go together",
        "leave one of them out",
    ),
    ("worker_method", "with a DataPipe"): Case(
        {"worker_method": "thread"},
        {"dataset": IterableWrapper(NUMBERS), "num_workers": 1},
        "worker_method='thread' and a DataPipe as dataset do not go together",
        "or use a Dataset",
    ),
    ("worker_method", "with a `Dispatch`"): Case(
        {"worker_method": "thread"},
        dispatch(),
        "worker_method='thread' and a Dispatch as dataset do not go together",
        "with num_workers=1",
    ),
    ("worker_concurrency", "with an `IterableDataset`"): Case(
        {"worker_concurrency": 2},
        {"dataset": Stream(range(4)), "num_workers": 1},
        "worker_concurrency=2 and an IterableDataset do not go together",
        "leave worker_concurrency out",
    ),
    ("worker_concurrency", "with a dataset that has a `state_dict`"): Case(
        {"worker_concurrency": 2},
        {"dataset": Saved(), "num_workers": 1},
        "worker_concurrency=2 and a dataset with a state_dict do not go together",
        "or pass snapshot_every_n_steps=None",
        stateful=True,
    ),
    ("worker_task", "with an `IterableDataset`"): Case(
        {"worker_task": "sample"},
        {"dataset": Stream(range(4)), "num_workers": 1},
        "worker_task='sample' and an IterableDataset do not go together",
        "leave worker_task out",
    ),
    ("worker_task", "with a dataset that has a `state_dict`"): Case(
        {"worker_task": "sample"},
        {"dataset": Saved(), "num_workers": 1},
        "worker_task='sample' and a dataset with a state_dict do not go together",
        "or pass snapshot_every_n_steps=None",
        stateful=True,
    ),
    ("last_batch", "with `batch_size=None`"): Case(
        {"last_batch": "keep"},
        {"batch_size": None},
        "last_batch='keep' and batch_size=None do not go together",
        "pass a batch_size",
    ),
    ("last_batch", "with a `batch_sampler` that treats its last batch in another way"): Case(
        {"last_batch": "keep"},
        {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 2, True)},
        "last_batch='keep' and batch_sampler=<",
        "pass a ringloader.RolloverBatchSampler to roll over",
    ),
    ("last_batch", 'with `drop_last`, unless `"discard"`'): Case(
        {"last_batch": "keep"},
        {"drop_last": True},
        "last_batch='keep' and drop_last=True do not go together",
        "leave drop_last out",
    ),
    ("last_batch", "with an `IterableDataset`"): Case(
        {"last_batch": "rollover"},
        {"dataset": Stream(range(4))},
        "last_batch='rollover' and an IterableDataset do not go together",
        "use 'keep' or 'discard'",
    ),
    ("worker_reset_fn", "with a `Dispatch`"): Case(
        # The seed is for the function, and goes with it.
        {"worker_reset_fn": told, "seed": 3},
        dispatch(),
        "worker_reset_fn=<function told",
        "leave one of them out",
    ),
    ("sample_timeout", "with a `Dispatch`"): Case(
        {"sample_timeout": 2.0},
        dispatch(),
        "sample_timeout=2.0 and a Dispatch as dataset do not go together",
        "leave sample_timeout out, or use timeout",
    ),
    ("sample_timeout", "with an `IterableDataset`"): Case(
        {"sample_timeout": 2.0},
        {"dataset": Stream(range(4)), "num_workers": 1},
        "sample_timeout=2.0 and an IterableDataset do not go together",
        "use timeout, or watchdog",
    ),
    ("restart_workers", "with a `Dispatch`"): Case(
        {"restart_workers": 2},
        dispatch(),
        "restart_workers=2 and a Dispatch as dataset do not go together",
        "leave restart_workers out",
    ),
    ("on_error", "with a `Dispatch`"): Case(
        {"on_error": "skip", "max_errors": 3},
        dispatch(),
        "on_error='skip' and a Dispatch as dataset do not go together",
        "or leave on_error out",
    ),
    ("on_error", "with an `IterableDataset`"): Case(
        {"on_error": "retry"},
        {"dataset": Stream(range(4)), "num_workers": 1},
        "on_error='retry' and an IterableDataset do not go together",
        "use 'skip', or a function of the index and the error",
    ),
    ("prefetch_epochs", "without `persistent_workers` or `worker_pool`"): Case(
        {"prefetch_epochs": True},
        {"num_workers": 1},
        "prefetch_epochs=True and persistent_workers=False with num_workers=1 do not go together",
        "or leave prefetch_epochs out",
    ),
    ("prefetch_epochs", "with an `IterableDataset`"): Case(
        {"prefetch_epochs": True},
        {"dataset": Stream(range(4)), **PERSISTENT},
        "prefetch_epochs=True and an IterableDataset do not go together",
        "leave prefetch_epochs out",
    ),
    ("prefetch_epochs", "with a dataset that has a `state_dict`"): Case(
        {"prefetch_epochs": True},
        {"dataset": Saved(), **PERSISTENT},
        "prefetch_epochs=True and a dataset with a state_dict do not go together",
        "or pass snapshot_every_n_steps=None",
        stateful=True,
    ),
    ("prefetch_epochs", 'with `worker_method="thread"`, if the dataset has `set_epoch`'): Case(
        {"prefetch_epochs": True, "worker_method": "thread"},
        {"dataset": Told(), **PERSISTENT},
        "prefetch_epochs=True and worker_method='thread' over a dataset with set_epoch do not go together",
        "leave one of them out",
    ),
}
BY_NAME = {(rule.option, rule.what): rule for rule in RULES}


def case_of(rule):
    case = CASES[rule.option, rule.what]
    return case, {"dataset": NUMBERS, **case.arguments}, f"^{re.escape(case.text)}.*{re.escape(case.remedy)}$"


def is_convertible(rule):
    """True for options that a loader can have after its constructor."""
    return all(TABLE[name].instead is None for name in CASES[rule.option, rule.what].options)


def loader_class(case):
    return ringloader.StatefulDataLoader if case.stateful else torch.utils.data.DataLoader


def test_each_rule_has_a_case_and_names_of_its_own():
    assert len(BY_NAME) == len(RULES)
    assert set(CASES) == set(BY_NAME)


def named(found):
    return pytest.mark.parametrize(
        "rule", found, ids=[f"{rule.option} {rule.what}".replace("`", "") for rule in found]
    )


@named(RULES)
def test_a_case_breaks_its_rule_and_no_earlier_one(rule):
    case, arguments, _ = case_of(rule)
    options = types.SimpleNamespace(**{**DEFAULTS, **case.options})
    changed = [name for name, value in vars(options).items() if value != DEFAULTS[name]]
    facts = Facts(loader_class(case)(**arguments))
    same = [other for other in RULES if other.when == rule.when]
    assert next(broken(same, options, changed, facts)) is rule


@named(RULES)
def test_the_constructor_refuses(rule):
    case, arguments, text = case_of(rule)
    cls = ringloader.StatefulDataLoader if case.stateful else ringloader.DataLoader
    with pytest.raises(ValueError, match=text):
        cls(**arguments, **case.options)


@named([rule for rule in RULES if is_convertible(rule)])
def test_convert_refuses(rule):
    case, arguments, text = case_of(rule)
    cls = loader_class(case)
    loader = cls(**arguments)
    with pytest.raises(ValueError, match=text):
        ringloader.convert(loader, **case.options)
    assert type(loader) is cls


@named([rule for rule in RULES if rule.when == "given"])
def test_install_and_a_text_refuse_options_that_go_with_no_loader(rule):
    case, _, text = case_of(rule)
    with pytest.raises(ValueError, match=text):
        ringloader.install(**case.options)
    with pytest.raises(ValueError, match=text):
        by_name.checked("a text", case.options)


@named([rule for rule in RULES if rule.is_left_aside and is_convertible(rule)])
def test_install_leaves_the_option_aside_and_the_report_says_so(rule):
    case, arguments, text = case_of(rule)
    loader = loader_class(case)(**arguments)
    found, texts = features.fitting(loader, Options(**case.options))
    assert getattr(found, rule.option) == DEFAULTS[rule.option]
    assert len(texts) == 1 and re.search(text, texts[0])
    # A stateful one has options of its own.
    if not case.stateful:
        with ringloader.installed(**case.options):
            assert len(list(loader)) > 0
            assert case.text in ringloader.report(loader).reason


@named([rule for rule in RULES if rule.when == "begun"])
def test_what_has_changed_since_is_found_when_an_epoch_begins(rule):
    case, arguments, text = case_of(rule)
    cls = ringloader.StatefulDataLoader if case.stateful else ringloader.DataLoader
    loader = cls(**arguments)
    vars(loader)[table.OPTIONS] = Options(**case.options)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn before"


def test_without_threads_the_rules_of_threads_ask_nothing():
    """Also of an option that is none without workers."""
    assert len(list(ringloader.DataLoader(NUMBERS, worker_method="thread"))) == 4


def test_options_that_are_nothing_without_one_that_is_left_aside_go_with_it(monkeypatch):
    monkeypatch.setattr(select_path, "log_once", lambda _: None)
    options = Options(device="cpu", device_transform=told, seeding="epoch", seed=3, stats=True)
    assert table.without(options, ["device"]) == Options(seeding="epoch", seed=3, stats=True)
    assert table.without(options, ["device", "seeding"]) == Options(stats=True)
    assert features.in_worker(options) == Options(seeding="epoch", seed=3, stats=True)
    assert features.in_worker(options, is_installed=True) == Options(stats=True)
