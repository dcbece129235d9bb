"""``prefetch_epochs`` with samplers that raise, that are the program's, or that change."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from prefetch_epochs_parts import (
    LENGTH,
    Asked,
    Counting,
    Drawing,
    made,
    next_epoch_of,
)
from torch.utils.data import (
    Sampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringloader import DataLoader, StatefulDataLoader
from ringloader._torch import select_path

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True, params=["batch", pytest.param("sample", marks=pytest.mark.slow)])
def task(request, monkeypatch):
    monkeypatch.setattr("prefetch_epochs_parts.TASK", request.param)
    return request.param


class Failing:
    """Indices of a sampler of torch's, which raise behind the first epoch.

    Args:
        error: The class of the error.
        behind: True to raise at the second index, not at the length.
        times: How often.
    """

    def __init__(self, error, behind, times):
        self.error = error
        self.behind = behind
        self.asked = 0
        self.left = times

    def __len__(self):
        self.raise_if(self.asked >= LENGTH and not self.behind)
        return LENGTH

    def __getitem__(self, index):
        self.asked += 1
        self.raise_if(self.asked >= LENGTH + 2 and self.behind)
        return index

    def raise_if(self, is_time):
        if is_time and self.left:
            self.left -= 1
            raise self.error("no order")


def failing(error, behind=True, times=1):
    return made(cls=StatefulDataLoader, sampler=SubsetRandomSampler(Failing(error, behind, times)))


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_an_error_of_the_sampler_is_raised_at_iter_if_it_comes_again(behind, times):
    with failing(ValueError, behind, times) as loader:
        assert len(list(loader)) == 10
        sampler = loader.sampler.indices
        assert sampler.left == times - 1, "the next epoch was begun"
        if times == 2:
            with pytest.raises(ValueError, match="no order"):
                iter(loader)
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))
        assert sampler.left == 0


def test_an_error_of_the_sampler_that_nobody_sees_keeps_no_workers():
    gc.disable()
    try:
        loader = failing(ValueError)
        iterator = iter(loader)
        assert len(list(iterator)) == 10
        assert not next_epoch_of(iterator)._begun.is_whole
        gone = weakref.ref(iterator)
        del iterator, loader
        assert gone() is None
    finally:
        gc.enable()


def test_an_interrupt_where_it_begins_loses_no_batch():
    with failing(KeyboardInterrupt) as loader:
        batches = iter(loader)
        found = []
        interrupts = 0
        while True:
            try:
                found.append(next(batches)[0].tolist())
            except KeyboardInterrupt:
                interrupts += 1
                assert loader.state_dict()["batches"] == len(found)
            except StopIteration:
                break
        assert interrupts == 1
        assert sorted(itertools.chain(*found)) == list(range(LENGTH))
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))


class Hidden(Sampler):
    """Is told its epoch, and does not show it."""

    def __init__(self):
        self._told = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter([(index + self._told) % LENGTH for index in range(LENGTH)])

    def set_epoch(self, epoch):
        self._told = epoch


class Cursor(Sampler):
    """Goes on where it was left, as one that can be resumed."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        while self.at < LENGTH:
            self.at += 1
            yield self.at - 1
        self.at = 0


class OfEpoch(Sampler):
    """Has an order for each epoch, which the program sets."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Around(Sampler):
    """Stands around another sampler, under a name of its own."""

    def __init__(self):
        self.base = DistributedSampler(range(LENGTH), 1, 0)

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(self.base)


class Counted(Counting):
    """Counts at the beginning of an epoch."""

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist())


PROGRAMS_SAMPLERS = {
    "hidden epoch": (Hidden, lambda sampler, epoch: sampler.set_epoch(epoch)),
    "cursor": (Cursor, lambda _sampler, _epoch: None),
    "epoch without set_epoch": (OfEpoch, lambda sampler, epoch: setattr(sampler, "epoch", epoch)),
    "around another": (Around, lambda sampler, epoch: sampler.base.set_epoch(epoch)),
    "counts": (lambda: Counted(range(LENGTH)), lambda _sampler, _epoch: None),
    "a drawing one": (Drawing, lambda _sampler, epoch: torch.manual_seed(epoch)),
}


@pytest.mark.parametrize("kind", PROGRAMS_SAMPLERS)
def test_iter_begins_each_epoch_of_a_sampler_of_the_programs(kind, caplog, monkeypatch):
    monkeypatch.setattr(select_path, "_logged", set())
    make, name = PROGRAMS_SAMPLERS[kind]

    def orders(kind_of_loader, **options):
        sampler = make()
        torch.manual_seed(0)
        with contextlib.closing(
            kind_of_loader(Asked(), 2, sampler=sampler, num_workers=1, persistent_workers=True, **options)
        ) as loader:
            found = []
            for epoch in range(4):
                name(sampler, epoch)
                found.append([index for batch in loader for index in batch[0].tolist()])
        return found

    assert orders(Closing, prefetch_epochs=True) == orders(TorchClosing)
    assert sum("prefetch_epochs has no effect" in record.message for record in caplog.records) == 1


class Closing(DataLoader):
    def close(self):
        self.shutdown()


class TorchClosing(torch.utils.data.DataLoader):
    def close(self):
        del self._iterator
