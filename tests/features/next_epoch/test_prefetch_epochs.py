"""``prefetch_epochs``: the next epoch begins before ``iter``, and nothing else of it shows."""

import gc
import itertools
import threading
import time

import pytest
import torch
from prefetch_epochs_parts import (
    LENGTH,
    Asked,
    Counting,
    Drawing,
    ToldAsked,
    kill,
    lists,
    made,
    next_epoch_of,
    worker_pid,
)
from torch.utils.data import (
    BatchSampler,
    MapDataPipe,
    RandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import ringloader
from faults import script
from ringloader import DataLoader, StatefulDataLoader
from ringloader._features.next_epoch.next_epoch import NextEpoch
from small_datasets import Made, Stream

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True, params=["batch", pytest.param("sample", marks=pytest.mark.slow)])
def task(request, monkeypatch):
    monkeypatch.setattr("prefetch_epochs_parts.TASK", request.param)
    return request.param


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


class Seeded(MapDataPipe):
    """Says with each sample if it was given the seed of an epoch."""

    seed = None

    def set_seed(self, seed):
        self.seed = seed

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, self.seed is not None


def test_no_epoch_of_a_map_style_data_pipe_has_a_shared_seed():
    """torch draws one for an ``IterDataPipe`` alone, which this option refuses."""

    def seen(cls, **options):
        torch.manual_seed(5)
        loader = cls(Seeded(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True, **options)
        return [(lists(loader), loader._iterator._shared_seed) for _ in range(3)]

    torchs = seen(torch.utils.data.DataLoader)
    assert [seed for _, seed in torchs] == [None] * 3
    assert not any(has_seed for batches, _ in torchs for _, seeds in batches for has_seed in seeds)
    assert seen(DataLoader, prefetch_epochs=True) == torchs
    with pytest.raises(ValueError, match="prefetch_epochs=True and an IterableDataset"):
        DataLoader(
            IterableWrapper(range(LENGTH)), num_workers=2, persistent_workers=True, prefetch_epochs=True
        )


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
        assert not any(type(feature) is NextEpoch for feature in loader._iterator._features)


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
        assert next_epoch_of(loader._iterator)._begun is not None
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
    assert next_epoch_of(iterator)._begun is None
    iterator._shutdown_workers()


def test_a_program_ends_with_an_epoch_that_nobody_asks_for(tmp_path):
    ended = script.run_script(
        "ringloader",
        """
        options = dict(num_workers=2, persistent_workers=True, prefetch_epochs=True)
        loader = DataLoader(torch.arange(40), batch_size=2, **options)
        assert len(list(loader)) == 20
        next_epoch = next(one for one in loader._iterator._features if hasattr(one, "_begun"))
        assert next_epoch._begun.is_whole
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
