"""`Dispatch` in order: workers that would take items at different rates are refused, or end their epoch."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.utils.data

import ringloader
from faults.proc import Snapshot
from ringloader import DataLoader, Dispatch

pytestmark = pytest.mark.rings_only

REFUSED = (
    r"Dispatch with filter\(\) and in_order=True .* 2 workers.*pass in_order=False, or filter in the source"
)


def is_even(number):
    return number % 2 == 0


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None}, {"persistent_workers": True}])
def test_a_filter_in_order_is_refused(options):
    dataset = Dispatch(range(20)).map(int).filter(is_even).batch(2)
    with pytest.raises(ValueError, match=REFUSED):
        DataLoader(dataset, num_workers=2, **options)
    with pytest.raises(ValueError, match=REFUSED), ringloader.WorkerPool(2) as pool:
        DataLoader(dataset, worker_pool=pool)
    for fitting in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "in_order": False}):
        assert sum(1 for _ in DataLoader(dataset, **fitting, batch_size=None)) == 5


def test_install_and_convert_refuse_it_too():
    loader = torch.utils.data.DataLoader(Dispatch(range(20)).filter(is_even), num_workers=2)
    with pytest.raises(ValueError, match=REFUSED):
        iter(ringloader.convert(loader))
    snapshot = Snapshot.take()
    ringloader.install()
    try:
        with pytest.raises(ValueError, match=REFUSED):
            iter(loader)
    finally:
        ringloader.uninstall()
    snapshot.assert_nothing_left()


class BadAt:
    """A function that raises at these numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __call__(self, array):
        if array[0] in self.numbers:
            raise ValueError(f"{int(array[0])} is bad")
        return array


class Arrays:
    """Arrays of their numbers."""

    def __init__(self, n, elements=1):
        self.n = n
        self.elements = elements

    def __iter__(self):
        for number in range(self.n):
            yield np.full(self.elements, number)


class Fails:
    """A source that raises at 1, and goes on."""

    def __init__(self, of):
        self.of = of

    def __iter__(self):
        return map(BadAt([1]), self.of)


def outcomes(loader):
    """The first numbers of batches, and the last lines of errors."""
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(next(iterator)[..., 0].tolist())
        except (ValueError, RuntimeError) as error:
            found.append(str(error).strip().splitlines()[-1])
        except StopIteration:
            return found


@pytest.fixture
def snapshot():
    return Snapshot.take()


@pytest.mark.parametrize("elements", [1, 1 << 17])
@pytest.mark.parametrize("dataset", [lambda of: Dispatch(of).map(BadAt([1])), lambda of: Dispatch(Fails(of))])
def test_a_worker_whose_batch_is_an_error_takes_no_more_items(dataset, elements, snapshot):
    loader = DataLoader(
        dataset(Arrays(200, elements)),
        4,
        num_workers=2,
        timeout=60,
        persistent_workers=True,
        max_shared_bytes=12 << 20,
    )
    for _ in range(2):
        found = outcomes(loader)
        errors = [text for text in found if isinstance(text, str)]
        assert found[1] == errors[0] == "ValueError: 1 is bad"
        assert "a worker takes no more items" in errors[1] and "Pass in_order=False" in errors[1]
        assert len(errors) == 2
        # The other one takes the rest, but for what the first one was sent by then.
        taken = [number for batch in found if isinstance(batch, list) for number in batch]
        assert taken == sorted(set(taken)) and taken[0] == 0 and len(taken) > 200 - 2 * 16
    loader.shutdown()
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("options", [{"in_order": False}, {"num_workers": 1}, {"batch_size": None}])
def test_elsewhere_an_error_ends_no_epoch(options):
    options = {"batch_size": 4, "num_workers": 2, **options}
    found = outcomes(DataLoader(Dispatch(Arrays(40)).map(BadAt(range(1, 40, 2))), timeout=60, **options))
    errors = [text for text in found if isinstance(text, str)]
    assert len(errors) == 20 and all("is bad" in text for text in errors)


class Refills:
    """Arrays over one memory that is filled anew for each."""

    def __iter__(self):
        array = np.zeros(1 << 12)
        for number in range(400):
            array[:] = number
            yield array


def test_bytes_of_items_stay_what_they_were():
    dataset = Dispatch(Refills(), prefetch=2).filter(lambda item: item[0] % 4 < 2)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, timeout=60, in_order=False)
    found = list(loader)
    assert all((batch == batch[:, :1]).all() for batch in found)
    numbers = sorted(int(number) for batch in found for number in batch[:, 0])
    assert numbers == [number for number in range(400) if number % 4 < 2]


def test_a_slow_source_keeps_the_order():
    def slow():
        for number in range(24):
            time.sleep(0.05)
            yield torch.full((1,), number)

    class Slow:
        def __iter__(self):
            return slow()

    loader = DataLoader(Dispatch(Slow()), None, num_workers=2, prefetch_factor=1, timeout=60)
    assert outcomes(loader) == list(range(24))
