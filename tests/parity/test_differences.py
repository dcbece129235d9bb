"""The rows of docs/differences.md that no other file has a test for, and that every row has its test."""

from __future__ import annotations

import ast
import multiprocessing
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data import dataloader as torch_dataloader

from parity import harness
from parity.datasets import Blocks, Samples, identity
from ringloader import DataLoader, StatefulDataLoader
from ringloader._features import table
from ringloader._features.table import TABLE
from small_datasets import Made

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?!what \||---).*\|$", re.M)
NOTES = re.compile(r"(?:\[\^\w+\])+ \|$")
NOTE = re.compile(r"^\[\^(\w+)\]: `(tests/[\w/]+\.py)::(test_\w+)`$", re.M)


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_its_test():
    """Its footnotes name it, behind the last column."""
    page = (ROOT / "docs" / "differences.md").read_text()
    notes = {name: (path, test) for name, path, test in NOTE.findall(page)}
    rows = ROW.findall(page)
    assert len(rows) > 10
    used = set()
    for row in rows:
        found = NOTES.search(row)
        assert found, f"no test at the end of: {row}"
        used |= set(re.findall(r"\w+", found[0]))
    assert used == set(notes), "footnotes and rows"
    assert [note for note in notes.values() if note[1] not in functions(note[0])] == []


@pytest.fixture
def batches(loader_class):
    """A batch of each loader, torch's first."""
    found = []
    for kind in (torch.utils.data.DataLoader, loader_class):
        found.append(list(kind(Blocks(2, 5000), num_workers=1, batch_size=None, collate_fn=identity)))
    return [list(each[0]) for each in found]


@pytest.mark.rings_only
def test_batches_are_not_known_to_be_shared(batches):
    assert [[leaf.is_shared() for leaf in batch] for batch in batches] == [[True, True], [False, False]]


def _write(received, answers):
    for _ in range(2):
        block = received.get()
        block.fill_(9)
        answers.put(None)


@pytest.mark.rings_only
def test_a_batch_is_sent_on_as_a_copy(batches):
    """Torch moves what it does not know to be shared; then both see what the other process writes."""
    context = multiprocessing.get_context("fork")
    received, answers = torch.multiprocessing.get_context("fork").SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_write, args=(received, answers))
    process.start()
    moved = []
    for batch in batches:
        before = batch[0].data_ptr()
        received.put(batch[0])
        answers.get()
        moved.append(batch[0].data_ptr() != before)
    process.join()
    assert moved == [False, True]
    assert [int(batch[0][0]) for batch in batches] == [9, 9]


class Rows(Dataset):
    def __init__(self):
        self.data = torch.zeros(2, 3).share_memory_()

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.rings_only
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_rows_of_a_tensor_in_shared_memory_are_copies(loader_class, method):
    """As a batch of their own. Where they are stacked, both copy them."""
    seen = []
    for kind in (torch.utils.data.DataLoader, loader_class):
        dataset = Rows()
        row = next(iter(kind(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)))
        dataset.data[0] = 7
        then = row.tolist()
        row += 1
        seen.append((then, dataset.data[0].tolist()))
    assert seen == [([7.0] * 3, [8.0] * 3), ([0.0] * 3, [7.0] * 3)]


@pytest.mark.rings_only
def test_the_iterator_is_a_subclass(loader_class):
    theirs = torch_dataloader._MultiProcessingDataLoaderIter
    assert type(iter(torch.utils.data.DataLoader(Samples(2), num_workers=1))) is theirs
    ours = type(iter(loader_class(Samples(2), num_workers=1)))
    assert ours is not theirs and issubclass(ours, theirs)


@pytest.mark.rings_only
@pytest.mark.parametrize("workers", [0, 1])
def test_what_iterators_and_loaders_have_beside_torchs(loader_class, workers):
    def names(kind):
        loader = kind(Samples(2), num_workers=workers)
        public = {name for name in dir(iter(loader)) if not name.startswith("_")}
        return public, set(dir(loader)) & {"shutdown", "__enter__", "__exit__"}

    assert names(torch.utils.data.DataLoader) == (set(), set())
    assert names(loader_class) == (
        {"limit", "pause", "resume", "is_paused"},
        {"shutdown", "__enter__", "__exit__"},
    )


def test_what_a_loader_has_beside_torchs():
    theirs, ours = torch.utils.data.DataLoader(Samples(2)), DataLoader(Samples(2), on_error="skip")
    names = {name for name in dir(ours) if not name.startswith("_")} - set(dir(theirs))
    assert names - {"shutdown"} == {
        *("errors", "set_epoch", "call_workers", "epoch_stats"),
        *TABLE,
    } - {"snapshot_every_n_steps", "num_workers"}
    stateful = {name for name in dir(StatefulDataLoader(Samples(2))) if not name.startswith("_")}
    assert stateful - {*names, *dir(theirs)} == {
        *("state_dict", "load_state_dict", "fingerprint", "snapshot_every_n_steps")
    }
    assert ours.on_error == "skip"
    with pytest.raises(AttributeError, match="on_error of a loader cannot be set"):
        ours.on_error = "raise"
    assert table.options_of(ours).on_error == "skip"


@pytest.mark.rings_only
def test_bookkeeping_is_native(loader_class):
    names = ("_task_info", "_workers_num_tasks", "_worker_queue_idx_cycle")
    iterator = iter(loader_class(Samples(2), num_workers=1))
    if harness.assert_path(iterator, 1) == "native":
        assert not any(name in vars(iterator) for name in names)
    theirs = iter(torch.utils.data.DataLoader(Samples(2), num_workers=1))
    assert "_task_info" in vars(theirs)


@pytest.mark.rings_only
@pytest.mark.parametrize("name", ["_next_data", "_next_index", "__next__"])
def test_a_method_replaced_in_mid_epoch(loader_class, monkeypatch, name):
    called = []
    owner = torch_dataloader._MultiProcessingDataLoaderIter
    owner = owner if name in vars(owner) else torch_dataloader._BaseDataLoaderIter
    original = vars(owner)[name]

    def theirs(self):
        called.append(name)
        return original(self)

    loader = loader_class(Samples(8), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    harness.assert_path(iterator, 1)
    next(iterator)
    monkeypatch.setattr(owner, name, theirs)
    next(iterator)
    assert called == ([name] if name == "__next__" else [])
    called.clear()
    assert len(list(loader)) == 8
    assert len(called) == (9 if name == "__next__" else 0)
    # The next iterator is torch's own, where its method takes effect.
    assert len(list(loader_class(Samples(8), num_workers=1))) == 8
    assert len(called) >= 8


def arrays(index):
    return np.full(3, index)


@pytest.mark.rings_only
def test_arrays_do_not_own_their_data(loader_class):
    def array(kind):
        return next(iter(kind(Made(arrays, 4), batch_size=None, num_workers=1, collate_fn=identity)))

    theirs, ours = array(torch.utils.data.DataLoader), array(loader_class)
    assert not ours.flags.owndata
    # From 3.14 on pickle has another default protocol.
    assert theirs.flags.owndata == (sys.version_info < (3, 14))
    if theirs.flags.owndata:
        theirs.resize(6)
        assert theirs.tolist() == [0] * 6
    with pytest.raises(ValueError, match="does not own its data"):
        ours.resize(6)
    assert np.resize(ours, 6).tolist() == [0] * 6


class SentLate(list):
    """Waits, where it is pickled, until the sampler has filled it again, but not for long."""

    refilled: threading.Event

    def __reduce_ex__(self, protocol):
        self.refilled.wait(0.2)
        return list, (list(self),)


class Reusing(torch.utils.data.Sampler):
    """Yields one list twice."""

    def __iter__(self):
        batch = SentLate([0, 1])
        batch.refilled = threading.Event()
        yield batch
        batch[:] = [2, 3]
        batch.refilled.set()
        yield batch

    def __len__(self):
        return 2


@pytest.mark.rings_only
def test_a_batch_sampler_that_reuses_one_list(loader_class):
    def batches(kind):
        return [batch.tolist() for batch in kind(range(4), batch_sampler=Reusing(), num_workers=1)]

    assert batches(torch.utils.data.DataLoader) == [[2, 3], [2, 3]]
    assert batches(loader_class) == [[0, 1], [2, 3]]


class Longer(torch.utils.data.IterableDataset):
    """Says less than it gives."""

    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 4


@pytest.mark.rings_only
def test_a_bound_next_survives_a_change_of_the_length():
    """Also once the length of its stream must be watched, for which torch's own method runs."""

    def told(kind):
        loader = kind(Longer(), batch_size=None, num_workers=1, persistent_workers=True)
        advance = iter(loader).__next__
        first = list(iter(advance, 5))
        len(loader)
        assert iter(loader) is advance.__self__
        with pytest.warns(UserWarning, match="Length of IterableDataset"):
            return first, [advance() for _ in range(6)]

    assert told(torch.utils.data.DataLoader) == told(DataLoader)


class Collating(Samples):
    """Tells what stands for torch's `collate` in a worker, and its `default_collate`."""

    def __getitem__(self, index):
        from torch.utils.data._utils import collate

        functions = (collate.collate, collate.default_collate)
        return " ".join(f"{type(function).__name__}" for function in functions)


def test_what_default_collate_calls_in_a_worker(loader_class):
    told = {
        kind: next(iter(kind(Collating(1), num_workers=1)))
        for kind in (torch.utils.data.DataLoader, loader_class)
    }
    assert list(told.values()) == [["function function"], ["Collate function"]]


def resized(samples):
    return torch.utils.data.default_collate(samples).resize_(1000).zero_()


def test_collated_numbers_keep_their_size():
    arguments = {"dataset": [1, 2], "batch_size": 2, "num_workers": 1, "collate_fn": resized}
    assert next(iter(torch.utils.data.DataLoader(**arguments))).shape == (1000,)
    with pytest.raises(RuntimeError, match="not resizable"):
        next(iter(DataLoader(**arguments)))


@pytest.mark.rings_only
@harness.needs_new_words
@pytest.mark.parametrize(
    "workers, options, file",
    [(harness.TOO_MANY, {}, "make.py"), (0, {"pin_memory": True, "stats": True}, "epochs.py")],
    ids=["workers", "pin_memory"],
)
def test_warnings_name_ringloaders_file(loader_class, workers, options, file):
    """Filters by category and message find them as torch's; filters by module do not."""
    if not workers and torch.accelerator.is_available():
        pytest.skip("an accelerator is here")
    files = []
    for cls in (torch.utils.data.DataLoader, loader_class):
        given = {name: value for name, value in options.items() if cls is loader_class or name != "stats"}
        loader = cls(Samples(1), num_workers=workers, **given)
        text = f"{workers} worker processes" if workers else "no accelerator"
        with pytest.warns(UserWarning, match=text) as caught:
            iter(loader)
        files += [Path(warning.filename).name for warning in caught]
    assert files[0] == "dataloader.py"
    assert file in files


@pytest.mark.rings_only
def test_the_traceback_of_a_worker_begins_in_ringloaders_loop(loader_class):
    class Failing(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise LookupError(index)

    quoted = []
    for cls in (torch.utils.data.DataLoader, loader_class):
        with pytest.raises(LookupError) as caught:
            next(iter(cls(Failing(), num_workers=1)))
        quoted.append([line for line in str(caught.value).splitlines() if line.startswith("  File")])
    torchs, ours = quoted
    assert "_worker_loop" in torchs[0] and "_worker/loop.py" in ours[0]
    assert torchs[1:] == ours[1:]
