"""``worker_method``: what is refused, when, and in which words; what of torch it changes, and when."""

import multiprocessing
import re
import subprocess
from multiprocessing import process

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import ringloader
from programs import client
from ringloader import DataLoader
from ringloader._features import worker_info
from ringloader._torch import internals, select_path

pytestmark = pytest.mark.rings_only

NUMBERS = list(range(4))
WRONG = [
    ({"worker_method": "fork"}, ValueError, r"worker_method must be one of \(.*\), not 'fork'"),
    ({"worker_method": None}, TypeError, "worker_method must be one of .*, not None"),
    ({"worker_method": 1}, TypeError, "worker_method must be one of .*, not 1"),
    (
        {"worker_method": "thread", "max_shared_bytes": 4096},
        ValueError,
        "worker_method='thread' and max_shared_bytes=4096 do not go together: .* leave one of them out",
    ),
    (
        {"worker_method": "thread", "main_prefetch": 2},
        ValueError,
        "worker_method='thread' and main_prefetch=2 do not go together: .* leave one of them out",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
@pytest.mark.parametrize("taken_by", ["class", "install", "convert"])
def test_what_is_wrong_is_said_at_once(options, error, text, taken_by):
    with pytest.raises(error, match=text):
        if taken_by == "class":
            DataLoader(NUMBERS, **options)
        elif taken_by == "convert":
            ringloader.convert(torch.utils.data.DataLoader(NUMBERS), **options)
        else:
            ringloader.install(**options)


@pytest.mark.parametrize("context", ["fork", multiprocessing.get_context("spawn")])
def test_a_start_method_does_not_go_with_threads(context):
    text = (
        "worker_method='thread' and multiprocessing_context=.* do not go together: .* leave one of them out"
    )
    with pytest.raises(ValueError, match=text):
        DataLoader(NUMBERS, num_workers=1, multiprocessing_context=context, worker_method="thread")
    plain = torch.utils.data.DataLoader(NUMBERS, num_workers=1, multiprocessing_context=context)
    with pytest.raises(ValueError, match=text):
        ringloader.convert(plain, worker_method="thread")
    assert type(plain) is torch.utils.data.DataLoader
    later = DataLoader(NUMBERS, num_workers=1, worker_method="thread")
    later.multiprocessing_context = context
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        iter(later)
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"


LEFT_ASIDE = {
    "a start method": ({"dataset": NUMBERS, "multiprocessing_context": "fork"}, "multiprocessing_context="),
    "a DataPipe": ({"dataset": IterableWrapper(NUMBERS)}, "a DataPipe as dataset"),
    "a Dispatch": ({"dataset": ringloader.Dispatch(NUMBERS), "batch_size": None}, "a Dispatch as dataset"),
}


@pytest.mark.parametrize("name", LEFT_ASIDE)
def test_installed_it_leaves_loaders_their_processes_where_these_say_so(name, caplog):
    arguments, text = LEFT_ASIDE[name]
    loader = torch.utils.data.DataLoader(num_workers=1, **arguments)
    text = f"worker_method='thread' and {text}.* do not go together"
    with ringloader.installed(worker_method="thread"):
        for _ in range(2):
            iterator = iter(loader)
            assert all(isinstance(worker, process.BaseProcess) for worker in iterator._workers)
            assert len(list(iterator)) == len(NUMBERS)
            found = ringloader.report(iterator)
            assert found.path != "threads"
            assert len(re.findall(text, found.reason)) == 1
        other = torch.utils.data.DataLoader(NUMBERS, num_workers=1)
        assert len(list(other)) == len(NUMBERS)
        assert ringloader.report(other).path == "threads"
    assert len(re.findall(text, caplog.text)) <= 1, "it is said once"
    with pytest.raises(ValueError, match=text):
        ringloader.convert(loader, worker_method="thread")


def test_a_datapipe_does_not_go_with_threads():
    with pytest.raises(ValueError, match="worker_method='thread' and a DataPipe as dataset do not go"):
        DataLoader(IterableWrapper(NUMBERS), num_workers=1, worker_method="thread")


def test_a_dispatch_does_not_go_with_threads():
    with pytest.raises(ValueError, match="worker_method='thread' and a Dispatch as dataset do not go"):
        DataLoader(ringloader.Dispatch(NUMBERS), num_workers=1, worker_method="thread")
    # Without workers the word means nothing.
    alone = DataLoader(ringloader.Dispatch(NUMBERS), batch_size=None, worker_method="thread")
    assert len(list(alone)) == len(NUMBERS)
    plain = torch.utils.data.DataLoader(ringloader.Dispatch(NUMBERS), batch_size=None)
    assert len(list(ringloader.convert(plain, worker_method="thread"))) == len(NUMBERS)


@pytest.mark.parametrize("name", ["_worker_loop", "get_worker_info"])
def test_what_of_torch_was_replaced_is_said(monkeypatch, name):
    loader = DataLoader(NUMBERS, num_workers=1, worker_method="thread")
    monkeypatch.setattr(internals.worker_module, name, lambda *_: None)
    with pytest.raises(RuntimeError, match=f"worker_method='thread' cannot be used: .*{name}"):
        iter(loader)


def test_what_this_torch_does_not_have_is_said(monkeypatch):
    loader = DataLoader(NUMBERS, num_workers=1, worker_method="thread")
    monkeypatch.setattr(internals, "missing_name", lambda: "WorkerInfo")
    with pytest.raises(RuntimeError, match=r"worker_method='thread' cannot be used: .* no WorkerInfo"):
        iter(loader)


def test_torchs_words_for_it():
    assert internals.WorkerInfo(id=0, num_workers=1, seed=1, dataset=None) is not None
    if internals.RNG is not None:
        assert set(internals.RNG.__slots__) == set(worker_info.RNG.__slots__)


def test_as_text():
    from ringloader._patch import by_name

    options, _ = by_name.from_text("worker_method=thread")
    assert options.worker_method == "thread"


PROGRAM = """
import torch
from torch.utils.data import get_worker_info
import ringloader
code, shared = get_worker_info.__code__, torch.UntypedStorage._new_shared.__func__
held = get_worker_info
for method in ("multiprocessing", "thread"):
    loader = ringloader.DataLoader(list(range(3)), num_workers=1, worker_method=method)
    changed = (held.__code__ is not code, torch.UntypedStorage._new_shared.__func__ is not shared)
    print(method, *changed, len(list(loader)), *(
        held.__code__ is not code, torch.UntypedStorage._new_shared.__func__ is not shared
    ))
same_file = held.__code__.co_filename == code.co_filename
print(torch.utils.data.get_worker_info is held, held(), held.__name__, same_file)
"""


def test_torch_is_changed_by_the_first_such_iterator_only():
    done = client.run(["-c", PROGRAM], timeout=150, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == [
        "multiprocessing False False 3 False False",
        "thread False False 3 True True",
        "True None get_worker_info True",
    ]


def test_no_server_for_spawn_is_started(monkeypatch):
    asked = []
    monkeypatch.setattr("ringloader._features.all.get_start_method", lambda **_: "spawn")
    monkeypatch.setattr("ringloader._features.spawn_server.prepare", asked.append)
    DataLoader(NUMBERS, num_workers=1, worker_method="thread")
    assert asked == []
    DataLoader(NUMBERS, num_workers=1)
    assert len(asked) == 1


def test_the_reason_is_looked_for_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(select_path, "reason_against_threads", lambda *_: select_path.Reason("of the test"))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="cannot be used: of the test; leave worker_method out"):
        iter(DataLoader(NUMBERS, num_workers=1, worker_method="thread"))
    assert torch.equal(torch.get_rng_state(), before)
