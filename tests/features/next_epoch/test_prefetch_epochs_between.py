"""``prefetch_epochs``: steps of the program between two epochs count for the next one."""

import itertools

import pytest
import torch
from prefetch_epochs_parts import LENGTH, Asked, Counting, ToldAsked, lists, made, worker_pid
from torch.utils.data import (
    RandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringloader import StatefulDataLoader

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True, params=["batch", pytest.param("sample", marks=pytest.mark.slow)])
def task(request, monkeypatch):
    monkeypatch.setattr("prefetch_epochs_parts.TASK", request.param)
    return request.param


def epochs_of(loader, numbers):
    """Returns the samples of an epoch for each number that ``set_epoch`` gives; None: it is not called."""
    found = []
    for number in numbers:
        if number is not None:
            loader.set_epoch(number)
        found.append(lists(loader))
    return found


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (3, 5, 7, 9, 11), (0, 1, 0, 4, 4, 4), (None, None, None)])
@pytest.mark.parametrize("name", ["distributed", "counting"])
def test_set_epoch_of_a_sampler_counts_whenever_it_comes_before_iter(name, numbers):
    def seen(prefetch):
        dataset = Asked()
        sampler = Counting(dataset)
        if name == "distributed":
            sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        with made(prefetch, dataset, StatefulDataLoader, sampler=sampler) as loader:
            found, epochs = [], []
            for number in numbers:
                if number is not None:
                    sampler.set_epoch(number)
                found.append([batch[0].tolist() for batch in loader])
                epochs.append((sampler.epoch, loader.state_dict()["epoch"]))
        return found, epochs, dataset.asked.value

    without, found = seen(False), seen(True)
    if name == "distributed":
        assert found[:2] == without[:2]
    assert found[0] == without[0]
    if numbers == (0, 1, 2, 3):
        assert found[2] <= 4 * LENGTH + 8, "each epoch was guessed"


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (None, 4, 5, 6), (7, 9, 2, None, None, 3), (None,) * 3])
@pytest.mark.parametrize("counted", [False, True])
def test_set_epoch_of_the_loader_reaches_the_workers_dataset(numbers, counted, task):
    def seen(prefetch):
        dataset = ToldAsked()
        # With shared tasks, `seeding` counts epochs.
        options = {"seeding": "epoch"} if counted and task == "batch" else {}
        with made(prefetch, dataset, StatefulDataLoader, **options) as loader:
            return epochs_of(loader, numbers), loader.state_dict()["number"], dataset.asked.value

    without, found = seen(False), seen(True)
    assert found[:2] == without[:2]
    if numbers in ((0, 1, 2, 3), (None,) * 3):
        assert found[2] <= len(numbers) * LENGTH + 8, "each epoch was guessed"


def test_set_epoch_in_the_middle_is_that_of_the_next_epoch():
    with made(dataset=ToldAsked()) as loader:
        for number in range(3):
            batches = iter(loader)
            next(batches)
            loader.set_epoch(number + 10)
            told = {epoch for batch in batches for epoch in batch[1].tolist()}
            assert told == {-1 if number == 0 else number + 9}
        assert loader.dataset.asked.value <= 3 * LENGTH + 8


class Numbered:
    """Says with each sample which epoch ``worker_reset_fn`` was given."""

    def __init__(self, dataset, seeds):
        self.dataset = dataset
        self.seeds = seeds

    def __getitem__(self, index):
        return index, self.seeds.epoch


def numbered(dataset, _info, seeds):
    return Numbered(dataset, seeds)


def test_a_dropped_epoch_leaves_the_numbers_of_those_that_follow():
    with made(worker_reset_fn=numbered) as loader:
        given = []
        for _ in range(4):
            given.append({number for batch in loader for number in batch[1].tolist()})
            loader.call_workers(worker_pid)
        assert given == [{0}, {1}, {2}, {3}]
        loader.set_epoch(9)
        assert {number for batch in loader for number in batch[1].tolist()} == {9}


def mark(dataset, value):
    dataset.epoch = value


def test_a_call_of_the_workers_between_epochs_reaches_all_batches_of_the_next():
    with made(dataset=ToldAsked()) as loader:
        list(loader)
        loader.dataset.wait_for(LENGTH + 8)
        loader.call_workers(mark, 77)
        assert {epoch for batch in loader for epoch in batch[1].tolist()} == {77}


def test_an_epoch_that_is_dropped_gives_its_draws_back():
    def seen(prefetch):
        torch.manual_seed(2)
        dataset = Asked()
        sampler = RandomSampler(dataset)
        with made(prefetch, dataset, sampler=sampler) as loader:
            found = []
            for number in (4, 7, 9):
                loader.set_epoch(number)
                found.append([batch[0].tolist() for batch in loader])
        return found

    assert seen(True) == seen(False)


def test_a_generator_that_is_set_before_a_dropped_epoch_keeps_its_seed():
    def seen(prefetch):
        generator = torch.Generator()
        with made(prefetch, shuffle=True, generator=generator) as loader:
            found = []
            for number in (4, 7, 9):
                loader.set_epoch(number)
                generator.manual_seed(number)
                found.append([batch[0].tolist() for batch in loader])
        return found

    assert seen(True) == seen(False)


def test_a_state_that_is_loaded_between_epochs_counts():
    with made(cls=StatefulDataLoader, shuffle=True) as loader:
        batches = iter(loader)
        head = lists(itertools.islice(batches, 4))
        state = loader.state_dict()
        rest = [batch[0].tolist() for batch in batches]
        assert len(head) + len(rest) == 10
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in loader] == rest
        assert len(list(loader)) == 10


@pytest.mark.parametrize("taken", [1, 7, 9, 10])
def test_an_epoch_that_is_given_up_at_any_batch_is_followed_by_a_whole_one(taken):
    with made(shuffle=True) as loader:
        held = []
        for _ in range(3):
            held += itertools.islice(loader, taken)
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))
        assert len(held) == 3 * taken


def test_a_shutdown_puts_draws_back():
    def orders(prefetch):
        generator = torch.Generator().manual_seed(1)
        loader = made(prefetch, shuffle=True, generator=generator)
        found = []
        for _ in range(3):
            found.append([batch[0].tolist() for batch in loader])
            loader.shutdown()
            found.append(generator.get_state().tolist())
        return found

    assert orders(True) == orders(False)
