"""speechbrain's replacements in torch's iterators, by a stand-in: `tests/frameworks` has the real ones."""

import functools
import logging
import types

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ringloader
from ringloader import DataLoader, StatefulDataLoader
from ringloader._torch import select_path
from small_datasets import Made

pytestmark = pytest.mark.rings_only

# As in speechbrain/dataio/dataloader.py.
SOURCE = """
def __new_init(self, loader, *args, **kwargs):
    self.__old_init__(loader, *args, **kwargs)
    if (
        hasattr(loader, "_speechbrain_recovery_skip_to")
        and loader._speechbrain_recovery_skip_to is not None
    ):
        for i in range(loader._speechbrain_recovery_skip_to):
            try:
                next(self._sampler_iter)
            except StopIteration:
                break
            self._num_yielded = i + 1
        loader._speechbrain_recovery_skip_to = None


def __new_reset(self, loader, first_iter=False, *args, **kwargs):
    if not first_iter:
        self._sampler_iter = iter(self._index_sampler)
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
"""


def squares(index):
    return index**2


class Saveable(torch.utils.data.DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._speechbrain_recovery_skip_to = None


def replace(monkeypatch, module="speechbrain.dataio.dataloader"):
    """Replaces two methods of torch's, as a module of that name does when it is imported."""
    theirs = types.ModuleType(module)
    exec(SOURCE, vars(theirs))
    constructor = functools.update_wrapper(vars(theirs)["__new_init"], _BaseDataLoaderIter.__init__)
    monkeypatch.setattr(_BaseDataLoaderIter, "__old_init__", _BaseDataLoaderIter.__init__, raising=False)
    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", constructor)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", vars(theirs)["__new_reset"])


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"num_workers": 2, "persistent_workers": True}, "native"),
        ({"num_workers": 2, "worker_method": "thread"}, "threads"),
        ({}, "single-process"),
    ],
)
def test_loaders_without_its_mark_are_ours(monkeypatch, options, path):
    replace(monkeypatch)

    def epochs(kind, **others):
        torch.manual_seed(1)
        loader = kind(Made(squares, 12), batch_size=4, shuffle=True, **options, **others)
        return loader, [[batch.tolist() for batch in loader] for _ in range(3)]

    loader, ours = epochs(DataLoader)
    assert ringloader.report(loader).path == path
    options.pop("worker_method", None)
    assert ours == epochs(torch.utils.data.DataLoader)[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_it_goes_on_within_is_torchs(monkeypatch, workers):
    replace(monkeypatch)

    def epochs(paths=None):
        torch.manual_seed(1)
        loader = Saveable(Made(squares, 12), batch_size=2, shuffle=True, num_workers=workers)
        loader._speechbrain_recovery_skip_to = 4
        found = []
        for _ in range(2):
            iterator = iter(loader)
            found += [[batch.tolist() for batch in iterator], iterator._num_yielded]
            if paths is not None:
                paths.append(ringloader.report(loader).path)
        return found

    theirs, paths = epochs(), []
    with ringloader.installed():
        assert epochs(paths) == theirs
    assert [len(batches) for batches in theirs[::2]] == [2, 6]
    assert paths == ["torch", "native" if workers else "single-process"]


def test_an_epoch_that_it_goes_on_within_has_no_state_of_ours(monkeypatch, caplog):
    replace(monkeypatch)
    monkeypatch.setattr(select_path, "_logged", set())
    loader = StatefulDataLoader(Made(squares, 12), batch_size=2)
    loader._speechbrain_recovery_skip_to = 4
    with caplog.at_level(logging.WARNING, "ringloader"):
        assert len(list(loader)) == 2
        assert loader.state_dict() == {}
    assert "speechbrain resumes within this epoch" in caplog.text
    assert len(list(loader)) == 6
    assert loader.state_dict()["_num_yielded"] == 6


def test_another_module_is_named(monkeypatch):
    module = "another.module"
    replace(monkeypatch, module)
    loader = DataLoader(Made(squares, 12), num_workers=1)
    reason = select_path.reason_for_torch(loader, torch.utils.data.DataLoader._get_iterator)
    assert reason.text == f"_BaseDataLoaderIter.__init__ was replaced by {module}"
    assert reason.warning == (
        f"{reason.text}, so torch's own loader runs; for ringloader's, leave out what replaced it, or put "
        "torch's back before the epoch"
    )
