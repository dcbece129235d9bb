"""``prefetch_epochs``: the next epoch begins before ``iter``, and nothing else of it shows."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import ringloader
from faults import script
from ringloader import DataLoader, StatefulDataLoader
from ringloader._torch import select_path
from small_datasets import Made, Stream

pytestmark = pytest.mark.rings_only

LENGTH = 20

# The way in which workers share the work, in all tests here.
TASK = "batch"


@pytest.fixture(autouse=True, params=["batch", pytest.param("sample", marks=pytest.mark.slow)])
def task(request, monkeypatch):
    monkeypatch.setattr(f"{__name__}.TASK", request.param)
    return request.param


class Asked(Dataset):
    """Counts, over all workers, how often it is asked for a sample, and draws for each."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.epoch = None
        self.asked = multiprocessing.Value("q", 0)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.asked:
            self.asked.value += 1
        return index, torch.rand(()).item()

    def wait_for(self, asked):
        """Waits until it was asked so often, no more."""
        deadline = time.monotonic() + 30
        while self.asked.value < asked:
            assert time.monotonic() < deadline, f"{self.asked.value} of {asked} samples"
            time.sleep(0.001)
        assert self.asked.value == asked


class ToldAsked(Asked):
    """Says with each sample which epoch it was told."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return index, -1 if self.epoch is None else self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


def made(prefetch=True, dataset=None, cls=DataLoader, **options):
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "worker_task": TASK} | options
    if options.get("batch_sampler") is not None:
        del options["batch_size"]
    return cls(Asked() if dataset is None else dataset, prefetch_epochs=prefetch, **options)


def lists(batches):
    return [[column.tolist() for column in batch] for batch in batches]


class Counting(Sampler):
    """Counts its epochs itself."""

    def __init__(self, source):
        self.source = source
        self.epoch = 0

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(len(self.source), generator=generator).tolist()
        self.epoch += 1

    def set_epoch(self, epoch):
        self.epoch = epoch


class Drawing(Sampler):
    """Draws from the program's generator as it goes."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))


KINDS = {
    "in order": lambda _: {},
    "shuffle": lambda _: {"shuffle": True},
    "generator": lambda _: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=90)},
    "rollover": lambda _: {"shuffle": True, "last_batch": "rollover", "batch_size": 3},
    "shorter than what is sent ahead": lambda _: {"shuffle": True, "prefetch_factor": 9},
    "rollover, shorter": lambda _: {
        "shuffle": True,
        "last_batch": "rollover",
        "batch_size": 7,
        "prefetch_factor": 9,
    },
    "one batch": lambda _: {"batch_size": LENGTH, "shuffle": True},
    "samples": lambda _: {"batch_size": None, "shuffle": True},
    "python's sampler": lambda _: {"sampler": Drawing()},
    "counting sampler": lambda data: {"sampler": Counting(data)},
    "batch sampler": lambda _: {"batch_sampler": [[1, 2], [5], [3, 4, 6], [0]]},
    "nested": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 3, False)},
    "seeding": lambda _: {"shuffle": True, "seeding": "sample", "seed": 3},
    "ahead": lambda _: {"shuffle": True, "main_prefetch": 2},
    "timeout": lambda _: {"shuffle": True, "timeout": 30, "watchdog": 30, "restart_workers": 1},
}


@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_what_the_loader_says_are_those_without_it(kind, cls):
    def seen(prefetch):
        torch.manual_seed(5)
        dataset = Asked()
        with made(prefetch, dataset, cls, **KINDS[kind](dataset)) as loader:
            found = []
            for _ in range(4):
                found.append([[torch.as_tensor(column).tolist() for column in batch] for batch in loader])
                found.append((len(loader), loader.errors))
                if cls is StatefulDataLoader:
                    found.append((loader.state_dict(), loader.fingerprint()))
        return found, dataset.asked.value

    (without, asked), (found, asked_ahead) = seen(False), seen(True)
    assert found == without
    # Nothing is made twice: all that is more is of an epoch that does not come.
    assert asked <= asked_ahead <= asked + LENGTH + 1


def test_out_of_order_each_epoch_has_its_samples():
    with made(shuffle=True, in_order=False) as loader:
        for _ in range(5):
            assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))
        assert loader.dataset.asked.value <= 5 * LENGTH + 8


def test_threads_get_the_same_order():
    def seen(prefetch):
        generator = torch.Generator().manual_seed(1)
        with made(prefetch, shuffle=True, generator=generator, worker_method="thread") as loader:
            return [[batch[0].tolist() for batch in loader] for _ in range(3)], loader.dataset.asked.value

    (without, _), (found, asked) = seen(False), seen(True)
    assert found == without
    assert asked <= 3 * LENGTH + 8


def test_the_first_batches_are_made_before_iter_is_called():
    with made(shuffle=True) as loader:
        for epoch in range(1, 4):
            list(loader)
            # Two batches of each worker.
            loader.dataset.wait_for(epoch * LENGTH + 8)


def test_they_go_out_while_batches_of_the_epoch_are_still_to_come(task):
    with made(shuffle=True) as loader:
        iterator = iter(loader)
        # The call that hands batch 7 out finds the end of the sampler, and the next one begins.
        batches = list(itertools.islice(iterator, 9))
        # Where workers share all tasks, four batches are under way over both epochs.
        loader.dataset.wait_for(LENGTH + (8 if task == "batch" else 6))
        batches += iterator
        assert len(batches) == 10


def test_draws_come_earlier_than_torchs():
    def states(loader, generator):
        """Returns the generator's states behind an epoch, and behind the first batch of the next one."""
        list(loader)
        behind = generator.get_state()
        next(iter(loader))
        return behind, generator.get_state()

    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    plain = torch.utils.data.DataLoader(Asked(), shuffle=True, generator=theirs, **options)
    behind, begun = states(plain, theirs)
    plain._iterator._shutdown_workers()
    with made(shuffle=True, generator=ours) as loader:
        found = states(loader, ours)
    assert torch.equal(found[0], begun) and torch.equal(found[1], begun)
    assert not torch.equal(behind, begun)


def test_without_it_nothing_is_asked_for_ahead():
    with made(prefetch=False, shuffle=True) as loader:
        list(loader)
        assert loader.dataset.asked.value == LENGTH
        assert loader._iterator._next_epoch is None


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
        options = {"reseed_workers": True} if counted and task == "batch" else {}
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


def worker_pid(_dataset):
    return os.getpid()


def mark(dataset, value):
    dataset.epoch = value


def test_a_call_of_the_workers_between_epochs_reaches_all_batches_of_the_next():
    with made(dataset=ToldAsked()) as loader:
        list(loader)
        loader.dataset.wait_for(LENGTH + 8)
        loader.call_workers(mark, 77)
        assert {epoch for batch in loader for epoch in batch[1].tolist()} == {77}


def test_a_generator_of_ones_own_that_is_set_meanwhile_counts():
    def seen(prefetch):
        generator = torch.Generator()
        with made(prefetch, shuffle=True, generator=generator) as loader:
            found = []
            for seed in (4, 4, 8):
                generator.manual_seed(seed)
                found.append([batch[0].tolist() for batch in loader])
        return found

    assert seen(True) == seen(False)


def test_an_epoch_that_is_dropped_gives_its_draws_back():
    def seen(prefetch):
        torch.manual_seed(2)
        dataset = Asked()
        sampler = RandomSampler(dataset)
        with made(prefetch, dataset, sampler=sampler) as loader:
            found = []
            for attribute in range(3):
                sampler.mine = attribute
                found.append([batch[0].tolist() for batch in loader])
        return found, torch.rand(()).item() if not prefetch else None

    assert seen(True)[0] == seen(False)[0]


def test_an_attribute_of_the_sampler_that_is_set_between_epochs_counts():
    weights = torch.ones(LENGTH)
    sampler = torch.utils.data.WeightedRandomSampler(weights, LENGTH)
    with made(sampler=sampler) as loader:
        list(loader)
        sampler.weights = torch.eye(LENGTH)[7]
        assert {index for batch in loader for index in batch[0].tolist()} == {7}
        # In place, as its version says.
        sampler.weights.copy_(torch.eye(LENGTH)[3])
        assert {index for batch in loader for index in batch[0].tolist()} == {3}


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


def large(index):
    return torch.full((1 << 16,), index)


def test_batches_that_are_held_keep_their_bytes_under_the_next_epoch():
    with made(dataset=Made(large, 8), batch_size=1, max_shared_bytes=8 << 20) as loader:
        held = []
        for _ in range(4):
            held.append(list(loader))
            # The workers are at the next one.
            time.sleep(0.02)
        for batches in held:
            for index, batch in enumerate(batches):
                assert bool((batch == index).all())


class Failing:
    """Indices of a sampler of torch's, which raise once behind the first epoch.

    Args:
        error: The error.
        behind: True to raise at the second index, not at the length.
    """

    def __init__(self, error, behind):
        self.error = error
        self.behind = behind
        self.asked = 0
        self.has_raised = False

    def __len__(self):
        if self.asked == LENGTH and not self.behind:
            self.raise_once()
        return LENGTH

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == LENGTH + 2 and self.behind:
            self.raise_once()
        return index

    def raise_once(self):
        if not self.has_raised:
            self.has_raised = True
            raise self.error


def failing(error, behind=True):
    return made(cls=StatefulDataLoader, sampler=SubsetRandomSampler(Failing(error, behind)))


@pytest.mark.parametrize("behind", [False, True])
def test_an_error_of_the_sampler_is_raised_at_iter(behind):
    with failing(ValueError("no order"), behind) as loader:
        assert len(list(loader)) == 10
        with pytest.raises(ValueError, match="no order") as caught:
            iter(loader)
        assert "in raise_once" in caught.value.__notes__[0]
        assert len(list(loader)) == 10


def test_an_error_of_the_sampler_that_nobody_sees_keeps_no_workers():
    gc.disable()
    try:
        loader = failing(ValueError("no order"))
        iterator = iter(loader)
        assert len(list(iterator)) == 10
        assert iterator._next_epoch._begun.error is not None
        gone = weakref.ref(iterator)
        del iterator, loader
        assert gone() is None
    finally:
        gc.enable()


def test_an_interrupt_where_it_begins_loses_no_batch():
    with failing(KeyboardInterrupt()) as loader:
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


class Resizable(Dataset):
    """Numbers, as many as the program says."""

    length = LENGTH

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def test_a_dataset_that_changes_its_length_has_an_epoch_of_the_new_one():
    dataset = Resizable()
    with made(dataset=dataset, shuffle=True, worker_method="thread") as loader:
        for length in (20, 8, 8, 14):
            dataset.length = length
            assert sorted(index for batch in loader for index in batch.tolist()) == list(range(length))


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


def test_a_sampler_that_takes_the_place_of_another_is_told_its_epochs():
    def orders(prefetch):
        dataset = Asked()
        batches = BatchSampler(DistributedSampler(dataset, 1, 0), 2, False)
        with made(prefetch, dataset, batch_sampler=batches) as loader:
            found = []
            for epoch in range(6):
                if epoch == 2:
                    batches.sampler = DistributedSampler(dataset, 1, 0, seed=3)
                batches.sampler.set_epoch(epoch)
                found.append([batch[0].tolist() for batch in loader])
        return found

    assert orders(True) == orders(False)


def kill(loader, worker):
    process = loader._iterator._workers[worker]
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_worker_that_dies_between_epochs_is_restarted(in_order):
    with made(restart_workers=2, in_order=in_order) as loader:
        list(loader)
        kill(loader, 1)
        for _ in range(2):
            assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))


class Slow(Asked):
    """Waits at its last sample until there is this file."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def __getitem__(self, index):
        while index == LENGTH - 1 and not self.gate.exists():
            time.sleep(0.001)
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_worker_that_dies_before_the_end_of_the_epoch_is_restarted(in_order, tmp_path):
    with made(dataset=Slow(tmp_path / "gate"), restart_workers=2, in_order=in_order) as loader:
        batches = iter(loader)
        found = lists(itertools.islice(batches, 9))
        # The last batch is worker 1's, and tasks of the next epoch are behind it.
        assert loader._iterator._next_epoch._begun is not None
        kill(loader, 1)
        loader.dataset.gate.touch()
        found += lists(batches)
        assert sorted(index for batch in found for index in batch[0]) == list(range(LENGTH))
        for _ in range(2):
            assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(LENGTH))


def test_a_death_without_restarts_is_an_error_and_ends():
    loader = made()
    list(loader)
    kill(loader, 0)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
    loader.shutdown()


def test_bad_samples_are_listed_and_counted_for_their_epoch():
    with made(dataset=Made(make_bad, LENGTH), on_error="skip", max_errors=2) as loader:
        for _ in range(3):
            assert len(list(loader)) == 10
            # Those of the next epoch were met by now.
            assert sorted(bad.index for bad in loader.errors) == [1, 18]


def make_bad(index):
    if index in (1, 18):
        raise ValueError(index)
    return (index,)


def test_a_limit_and_a_pause_hold():
    with made() as loader:
        for _ in range(3):
            iterator = iter(loader)
            iterator.limit(4)
            assert [len(list(iterator)), iterator.resume(), len(list(iterator))] == [4, None, 4]
            iterator.pause()
            assert list(iterator) == []
            iterator.limit(None)
            iterator.resume()
            assert len(list(iterator)) == 2


def test_threads_may_share_the_iterator():
    with made(shuffle=True) as loader:
        for _ in range(5):
            iterator, found = iter(loader), []

            def take(iterator=iterator, found=found):
                found.extend(iterator)

            threads = [threading.Thread(target=take) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert sorted(index for batch in found for index in batch[0].tolist()) == list(range(LENGTH))


def test_the_iterator_does_not_keep_its_loader():
    iterator = iter(made())
    gc.collect()
    assert len(list(iterator)) == 10
    assert iterator._next_epoch._begun is None
    iterator._shutdown_workers()


def test_a_program_ends_with_an_epoch_that_nobody_asks_for(tmp_path):
    ended = script.run_script(
        "ringloader",
        """
        options = dict(num_workers=2, persistent_workers=True, prefetch_epochs=True)
        loader = DataLoader(torch.arange(40), batch_size=2, **options)
        assert len(list(loader)) == 20
        assert loader._iterator._next_epoch._begun.is_whole
        """,
        tmp_path,
    )
    assert (ended.code, ended.err) == (0, "")


class Stateful(Asked):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"persistent_workers": False}, "persistent_workers=False with num_workers=2"),
        ({"persistent_workers": False, "num_workers": 0}, "num_workers=0"),
        ({"dataset": Stream(range(4))}, "an IterableDataset"),
        ({"dataset": Stateful(), "cls": StatefulDataLoader}, "state_dict"),
        ({"dataset": ToldAsked(), "worker_method": "thread"}, "threads share the dataset"),
    ],
)
def test_it_is_an_error_where_it_cannot_be(options, text):
    with pytest.raises(ValueError, match=text):
        made(**options)


def test_it_is_a_bool():
    with pytest.raises(TypeError, match="prefetch_epochs must be a bool, not 1"):
        made(prefetch=1)


def test_a_dataset_whose_state_is_never_taken_may_have_one():
    with made(dataset=Stateful(), cls=StatefulDataLoader, snapshot_every_n_steps=None) as loader:
        assert [len(list(loader)) for _ in range(2)] == [10, 10]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loader_with_a_pool_keeps_its_processes(method):
    with ringloader.WorkerPool(2, method) as pool:
        options = {"batch_size": 4, "shuffle": True, "worker_pool": pool, "prefetch_epochs": True}
        torch.manual_seed(1)
        loader = DataLoader(torch.arange(LENGTH), **options)
        found = [[batch.tolist() for batch in loader] for _ in range(3)]
        pids = {worker.pid for worker in loader._iterator._workers}
        loader.shutdown()
        torch.manual_seed(1)
        plain = torch.utils.data.DataLoader(
            torch.arange(LENGTH), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
        )
        assert found == [[batch.tolist() for batch in plain] for _ in range(3)]
        # They are the pool's again.
        second = DataLoader(torch.arange(LENGTH), worker_pool=pool)
        if method == "spawn":
            assert {worker.pid for worker in iter(second)._workers} == pids
        assert len(list(second)) == LENGTH


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_report_counts_the_epoch_that_ran_last(method):
    with made(worker_method=method) as loader:
        for epoch in range(1, 4):
            list(loader)
            loader.dataset.wait_for(epoch * LENGTH + 8)
            assert ringloader.report(loader).counters["batches"] == 10
        # Two epochs are told: that which is dropped, and the one in its place.
        loader.call_workers(worker_pid)
        list(loader)
        assert ringloader.report(loader).counters["batches"] == 10


def test_install_gives_it_to_loaders_with_persistent_workers():
    ringloader.install(prefetch_epochs=True)
    try:
        kept = torch.utils.data.DataLoader(Asked(), num_workers=1, persistent_workers=True)
        list(kept)
        kept.dataset.wait_for(LENGTH + 2)
        ended = torch.utils.data.DataLoader(Asked(), num_workers=1)
        assert len(list(ended)) == LENGTH
        assert "prefetch_epochs=True and persistent_workers=False" in ringloader.report(ended).reason
    finally:
        ringloader.uninstall()


class Told(Dataset):
    """Each sample says its index, its epoch and a number drawn for it; some raise."""

    epoch = -1

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index % 11 == 5:
            raise ValueError(index)
        return index, self.epoch, torch.rand(()).item()

    def set_epoch(self, epoch):
        self.epoch = epoch


def program(seed, prefetch):
    """Returns what a random program sees."""
    dice = random.Random(seed)
    dataset, generator = Told(dice.randrange(1, 40)), torch.Generator().manual_seed(seed)
    options = {
        "batch_size": dice.randrange(1, 7),
        "num_workers": dice.randrange(1, 4),
        "prefetch_factor": dice.randrange(1, 5),
        "last_batch": dice.choice(["keep", "discard", "rollover"]),
        "on_error": "skip",
        "generator": generator,
        "seeding": "sample",
        "main_prefetch": dice.choice([0, 2]),
        "restart_workers": dice.choice([0, 5]),
    }
    sampler = None
    if dice.random() < 0.5:
        sampler = DistributedSampler(dataset, num_replicas=2, rank=dice.randrange(2))
        options["sampler"] = sampler
    else:
        options["shuffle"] = True
    loader = made(prefetch, dataset, StatefulDataLoader, seed=3, **options)
    seen, state, is_missed = [], None, False
    with loader:
        for epoch in range(8):
            act = dice.random()
            if act < 0.4:
                loader.set_epoch(epoch + dice.choice([0, 0, 0, 2]))
            elif act < 0.5 and sampler is not None:
                sampler.set_epoch(epoch)
            elif act < 0.55 and epoch > 0 and not is_missed:
                loader.call_workers(worker_pid)
            elif act < 0.65 and state is not None:
                loader.load_state_dict(state)
            elif act < 0.7:
                generator.manual_seed(epoch)
            elif act < 0.75 and options["restart_workers"] and epoch > 0:
                # An epoch that needs no batch of it starts no successor.
                is_missed = True
                with contextlib.suppress(ProcessLookupError):
                    kill(loader, 0)
            most = dice.choice([None, None, None, 1, 3])
            for batch in itertools.islice(loader, most):
                seen.append([column.tolist() for column in batch])
                if dice.random() < 0.1:
                    state = loader.state_dict()
            seen.append((loader.state_dict(), loader.fingerprint(), [bad.index for bad in loader.errors]))
            seen.append(len(loader))
    return seen


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))]
)
def test_random_programs_see_what_they_see_without_it(seed):
    assert program(seed, True) == program(seed, False)
