"""What a batch goes through in the main process, between the scheduler and the caller."""

import warnings

import pytest
import torch
from torch.utils.data import IterableDataset

from ringloader import DataLoader
from ringloader._main import stages
from ringloader._options import Options
from ringloader._torch import internals

pytestmark = pytest.mark.rings_only


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 4


DATASETS = {"map": list(range(6)), "iterable": Stream()}


@pytest.fixture(params=["native", "rings"])
def _scheduling(request, monkeypatch):
    if request.param == "rings":
        from ringloader._torch import select_path

        monkeypatch.setattr(select_path, "reason_for_rings", lambda _: "the test wants it")


@pytest.fixture
def staged(monkeypatch):
    """Two stages for every iterator, and the loaders and options that they were asked for with."""
    asked = []

    def stages_for(loader, options):
        asked.append((loader.batch_size, options.max_shared_bytes))
        return (lambda batch: batch + 10, lambda batch: batch * 2)

    monkeypatch.setattr(stages, "stages_for", stages_for)
    return asked


@pytest.mark.usefixtures("_scheduling")
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("persistent", [False, True])
def test_each_batch_goes_through_all_stages_in_order(staged, kind, persistent):
    loader = DataLoader(
        DATASETS[kind],
        batch_size=None,
        num_workers=1,
        persistent_workers=persistent,
        max_shared_bytes=1 << 24,
    )
    for _ in range(2):
        assert [int(batch) for batch in loader] == [20, 22, 24, 26, 28, 30]
    assert staged == [(None, 1 << 24)] * (1 if persistent else 2)


def test_without_stages_a_batch_is_what_the_scheduler_gives():
    loader = DataLoader(DATASETS["map"], batch_size=None, num_workers=1)
    assert stages.stages_for(loader, Options()) == ()
    iterator = iter(loader)
    assert iterator._is_direct
    assert list(iterator) == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("_scheduling")
def test_what_a_stage_raises_is_the_callers(monkeypatch):
    def fails_at_two(batch):
        if batch == 2:
            raise KeyError("two")
        return batch

    monkeypatch.setattr(stages, "stages_for", lambda *_: (fails_at_two,))
    iterator = iter(DataLoader(DATASETS["map"], batch_size=None, num_workers=1))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyError, match="two"):
        next(iterator)
    assert list(iterator) == [3, 4, 5]


@pytest.mark.usefixtures("_scheduling")
def test_a_warning_names_the_file_that_torchs_names_through_stages_too(staged):
    def files_named(kind):
        loader = kind(DATASETS["iterable"], batch_size=None, num_workers=1)
        len(loader)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert len(list(iter(loader))) == 6
        # From 3.12 on, Python may have something to say of forks.
        return [one.filename for one in told if one.category is UserWarning]

    named = files_named(DataLoader)
    assert len(named) == 2
    assert named == files_named(torch.utils.data.DataLoader)
    assert staged


def test_a_kept_method_goes_on_under_torchs_scheduling(monkeypatch):
    loader = DataLoader(DATASETS["map"], batch_size=None, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    take, cls = iterator.__next__, type(iterator)
    assert [take() for _ in range(6)] == list(range(6))
    called = []
    torchs_own = internals.Iterator._try_put_index

    def _try_put_index(self):
        called.append(self)
        torchs_own(self)

    monkeypatch.setattr(internals.Iterator, "_try_put_index", _try_put_index)
    assert iter(loader) is iterator
    assert [int(take()) for _ in range(6)] == list(range(6))
    assert type(iterator) is cls
    assert called and set(map(id, called)) == {id(iterator)}
    assert iterator._rcvd_idx == 6
    with pytest.raises(StopIteration):
        take()
    monkeypatch.undo()
    assert [int(batch) for batch in loader] == list(range(6))


def test_a_profiled_epoch_has_torchs_record():
    iterator = iter(DataLoader(DATASETS["map"], batch_size=None, num_workers=1))
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(iterator)
    names = {event.key for event in profile.key_averages()}
    assert "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__" in names
    assert list(iterator) == [2, 3, 4, 5]
