"""Steps of options between torch's worker loop and the dataset."""

import os

import pytest
from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import dataloader as torch_dataloader

from ringloader import DataLoader
from ringloader._main import stages

pytestmark = pytest.mark.rings_only

CREATE_FETCHER = torch_dataloader._DatasetKind.create_fetcher


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch_dataloader._DatasetKind.create_fetcher is CREATE_FETCHER


class Stream(IterableDataset):
    def __iter__(self):
        return ((index, None) for index in range(4))


class Nested(Numbers):
    """With a loader of its own in the worker."""

    def __getitem__(self, index):
        return [int(batch) for batch in TorchsLoader([index], batch_size=None)]


class Counted:
    """A step that says in which process and epoch each batch was fetched."""

    def __init__(self):
        self.epoch = 0

    def __call__(self, fetcher):
        self.epoch += 1
        return _Counting(fetcher, self.epoch)


class _Counting:
    def __init__(self, fetcher, epoch):
        self._fetcher = fetcher
        self._epoch = epoch

    def fetch(self, index):
        return os.getpid(), self._epoch, self._fetcher.fetch(index)


def doubled(fetcher):
    """A step, the first of two."""

    class Doubling:
        def fetch(self, index):
            return fetcher.fetch(index), fetcher.fetch(index)

    return Doubling()


def fails(_fetcher):
    raise LookupError("no epoch can start")


class FailsLater:
    def __init__(self):
        self.epoch = 0

    def __call__(self, fetcher):
        self.epoch += 1
        return fails(fetcher) if self.epoch == 2 else fetcher


def use(monkeypatch, *steps):
    monkeypatch.setattr(stages, "steps_for", lambda *_: steps)


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_step_is_asked_at_the_start_of_each_epoch(monkeypatch, kind, start, persistent):
    use(monkeypatch, Counted())
    loader = DataLoader(
        kind(),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start,
        persistent_workers=persistent,
    )
    for epoch in (1, 2):
        batches = list(loader)
        assert [value for _, _, (value, _) in batches] == [0, 1, 2, 3]
        assert {told for _, told, _ in batches} == {epoch if persistent else 1}
        assert os.getpid() not in {pid for pid, _, _ in batches}


def test_steps_are_put_around_each_other_in_order(monkeypatch):
    use(monkeypatch, doubled, Counted())
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1)
    assert [batch[2] for batch in loader] == [([value, False], [value, False]) for value in range(4)]


def test_without_steps_torchs_own_fetcher_runs():
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1)
    assert list(loader) == [[value, True] for value in range(4)]


def test_a_loader_inside_the_dataset_is_left_alone(monkeypatch):
    use(monkeypatch, Counted())
    loader = DataLoader(Nested(), batch_size=None, num_workers=1)
    assert [batch[2] for batch in loader] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("step", [fails, FailsLater()], ids=["first", "second"])
def test_an_epoch_that_cannot_start_is_an_error_of_its_batches(monkeypatch, step):
    use(monkeypatch, step)
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1, persistent_workers=True)
    if step is not fails:
        assert [value for value, _ in loader] == [0, 1, 2, 3]
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(LookupError, match="no epoch can start"):
            next(iterator)
    if step is not fails:
        assert [value for value, _ in loader] == [0, 1, 2, 3], "the worker lives"
    del iterator
    loader._iterator = None
