"""Options between the worker loop and torch's fetcher."""

import os

import pytest
from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import Dataset
from torch.utils.data._utils import fetch

from ringloader import DataLoader
from ringloader._core import make
from ringloader._worker import options as worker_options
from ringloader._worker.options import EpochStart, WorkerOption
from small_datasets import Stream

pytestmark = pytest.mark.rings_only


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Nested(Numbers):
    """With a loader of its own in the worker."""

    def __getitem__(self, index):
        return [int(batch) for batch in TorchsLoader([index], batch_size=None)]


class Counted(WorkerOption):
    """Says in which process and epoch each batch was fetched."""

    def __init__(self):
        self.epoch = 0

    def wrap(self, fetcher):
        self.epoch += 1
        return _Counting(fetcher, self.epoch)


class _Counting:
    def __init__(self, fetcher, epoch):
        self._fetcher = fetcher
        self._epoch = epoch

    def fetch(self, index):
        return os.getpid(), self._epoch, self._fetcher.fetch(index)


class Doubled(WorkerOption):
    def wrap(self, fetcher):
        class Doubling:
            def fetch(self, index):
                return fetcher.fetch(index), fetcher.fetch(index)

        return Doubling()


class Fails(WorkerOption):
    """An option that fails where one epoch begins."""

    def __init__(self, epoch, method):
        self.epoch = epoch
        self.method = method
        self.begun = 0

    def begin(self, dataset, _start):
        self.begun += 1
        self._fail("begin")
        return dataset

    def wrap(self, fetcher):
        self._fail("wrap")
        return fetcher

    def _fail(self, method):
        if (self.begun, method) == (self.epoch, self.method):
            raise LookupError("no epoch can start")


def use(monkeypatch, *options):
    monkeypatch.setattr(make, "_worker_options_of", lambda *_: options)


@pytest.mark.parametrize("dataset", [range(4), Stream(range(4))], ids=["map", "iterable"])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "thread"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_option_is_asked_at_the_start_of_each_epoch(monkeypatch, dataset, start, persistent):
    use(monkeypatch, Counted())
    how = {"worker_method": start} if start == "thread" else {"multiprocessing_context": start}
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=persistent, **how)
    for epoch in (1, 2):
        batches = list(loader)
        assert [value for _, _, value in batches] == [0, 1, 2, 3]
        assert {told for _, told, _ in batches} == {epoch if persistent else 1}
        assert (os.getpid() in {pid for pid, _, _ in batches}) == (start == "thread")


def test_options_are_put_around_each_other_in_order(monkeypatch):
    use(monkeypatch, Doubled(), Counted())
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1)
    assert [batch[2] for batch in loader] == [(value, value) for value in range(4)]


def test_a_loader_inside_the_dataset_is_left_alone(monkeypatch):
    use(monkeypatch, Counted())
    loader = DataLoader(Nested(), batch_size=None, num_workers=1)
    assert [batch[2] for batch in loader] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("method", ["begin", "wrap"])
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_cannot_start_is_an_error_of_its_batches(monkeypatch, epoch, method):
    use(monkeypatch, Fails(epoch, method))
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1, persistent_workers=True)
    if epoch == 2:
        assert list(loader) == [0, 1, 2, 3]
    iterator = iter(loader)
    for _ in range(4):
        with pytest.raises(LookupError, match="no epoch can start"):
            next(iterator)
    assert list(loader) == [0, 1, 2, 3], "the worker lives"
    del iterator
    loader._iterator = None


class Told(WorkerOption):
    def __init__(self):
        self.calls = []

    def begin(self, dataset, _start):
        self.calls.append("begin")
        return dataset

    def wrap(self, fetcher):
        self.calls.append("wrap")
        return fetcher

    def miss(self, has_begun):
        self.calls.append("miss the rest" if has_begun else "miss")


@pytest.mark.parametrize(
    ("method", "then"), [("begin", ["begin", "miss"]), ("wrap", ["begin", "wrap", "miss the rest"])]
)
@pytest.mark.parametrize("is_iterable", [False, True])
def test_the_others_are_told_of_an_epoch_that_cannot_start(method, then, is_iterable):
    told = Told()
    fetcher = worker_options.begin_epoch(
        (told, Fails(1, method)), lambda _: _Counting(None, 0), Numbers(), EpochStart(), is_iterable
    )
    assert told.calls == then
    with pytest.raises(LookupError, match="no epoch can start"):
        fetcher.fetch(0)
    with pytest.raises(StopIteration if is_iterable else LookupError):
        fetcher.fetch(1)


class Replaced(fetch._MapDatasetFetcher):
    """Another library's fetcher."""

    def fetch(self, index):
        return super().fetch(index)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"on_error": "skip"}, "on_error"),
        ({"seeding": "sample"}, "seeding"),
        ({"sample_timeout": 9}, "sample_timeout"),
        ({"worker_task": "sample"}, "seeding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_of_samples_says_that_torchs_fetcher_was_replaced(monkeypatch, options, named):
    monkeypatch.setattr(fetch, "_MapDatasetFetcher", Replaced)
    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork", **options)
    with pytest.raises(RuntimeError, match=rf"{named}.* cannot take effect: .* was replaced by Replaced"):
        list(loader)
    assert [int(batch) for batch in DataLoader(Numbers(), num_workers=1, seeding="batch")] == [0, 1, 2, 3]
