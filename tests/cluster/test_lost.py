"""Workers and nodes that are lost: each batch comes once, in order, or there is an error."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ringloader
import ringloader.ray
from cluster.conftest import NODE_CPUS, actors, wait_for, with_settings
from cluster.datasets import Deadly, DeadlyStream, Told, numbers
from ringloader import DataLoader

pytestmark = pytest.mark.limit(240)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# Seeds and numbers of kills. `make cluster` has more.
KILLS = [(1, 3), (2, 6), (3, 6)] if os.environ.get("RINGLOADER_TEST_ALL") else [(1, 3)]


@pytest.mark.parametrize(("seed", "kills"), KILLS)
def test_each_batch_comes_once_after_kills(workers, seed, kills):
    at = random.Random(seed).sample(range(26), kills)
    loader = DataLoader(Told(120, 0.01), batch_size=4, worker_pool=workers)
    batches = []
    for batch in loader:
        if len(batches) in at:
            kill(int(batch[1][0]))
        batches.append(batch)
    assert numbers(batches) == list(range(120))
    counters = ringloader.report(loader).counters
    assert counters["replaced_workers"] > 0
    assert counters["batches"] == 30


def test_an_epoch_of_persistent_workers_goes_on_after_a_kill(workers):
    loader = DataLoader(Told(40, 0.01), batch_size=4, worker_pool=workers, persistent_workers=True)
    for epoch in range(2):
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3 and epoch == 0:
                kill(int(batch[1][0]))
        assert numbers(batches) == list(range(40))


def test_samples_drawn_by_their_place_are_the_same_after_a_kill(workers):
    def values(kills):
        loader = DataLoader(
            Drawn(48), batch_size=4, worker_pool=workers, seeding="sample", seed=3, shuffle=True
        )
        loader.set_epoch(0)
        found = []
        for at, (draws, pids) in enumerate(loader):
            found.append(draws.tolist())
            if kills and at == 2:
                kill(int(pids[0]))
        return found

    import torch

    torch.manual_seed(1)
    expected = values(kills=False)
    torch.manual_seed(1)
    assert values(kills=True) == expected


class Drawn(Told):
    def __getitem__(self, index):
        import torch

        return torch.rand(2), super().__getitem__(index)[1]


def test_a_batch_that_kills_its_worker_each_time_is_an_error(workers):
    twice = with_settings(workers, retries=1)
    loader = DataLoader(Deadly(40), batch_size=4, worker_pool=twice, num_workers=2)
    found = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker 1 .* exited unexpectedly") as caught:
        found.extend(loader)
    assert numbers(found) == list(range(12))
    notes = caught.value.__notes__
    assert notes[0] == "it was in batch 3 of the epoch: dataset indices [12, 13, 14, 15]"
    assert notes[1] == "retries=1: it was lost 2 times in this batch"


def test_without_retries_the_first_loss_is_an_error(workers):
    once = with_settings(workers, retries=0)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(DataLoader(Deadly(40), batch_size=4, worker_pool=once, num_workers=1))
    assert "retries=0: it was lost 1 times in this batch" in caught.value.__notes__


def test_an_iterable_dataset_has_no_silent_gap(workers):
    loader = DataLoader(DeadlyStream(), batch_size=2, worker_pool=workers, num_workers=2)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert any("IterableDataset is not restarted" in note for note in caught.value.__notes__)


def test_idle_actors_that_have_gone_are_replaced(workers):
    loader = DataLoader(Told(24), batch_size=4, worker_pool=with_settings(workers, retries=0), num_workers=2)
    # The ones that have the loader's dataset come first.
    for pid in {int(made) for _, pids in loader for made in pids}:
        kill(pid)
    assert numbers(loader) == list(range(24))


def test_memory_that_this_process_lacks_is_no_loss_of_a_worker(workers):
    loader = DataLoader(
        Told(48, elements=200_000), batch_size=4, worker_pool=workers, num_workers=1, max_shared_bytes=3 << 20
    )
    iterator = iter(loader)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A batch that is larger than a slot gets memory of its own, which is a file to the system.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(RuntimeError, match="could not take a batch of DataLoader worker 0") as caught:
            list(iterator)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ftruncate" in str(caught.value)
    assert caught.value.__notes__[0].startswith("it was in batch")
    assert ringloader.report(loader).counters["replaced_workers"] == 0


def test_a_frozen_worker_is_lost(workers):
    frozen = []
    loader = DataLoader(Told(60, 0.01), batch_size=4, worker_pool=workers)
    batches = []
    try:
        for batch in loader:
            batches.append(batch)
            if not frozen:
                frozen.append(int(batch[1][0]))
                os.kill(frozen[0], signal.SIGSTOP)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert numbers(batches) == list(range(60))
    # Woken up, it finds that it was given up.
    wait_for(lambda: not psutil.pid_exists(frozen[0]))


def test_a_node_that_goes(cluster):
    handler = signal.getsignal(signal.SIGTERM)
    node = cluster.add_node(num_cpus=NODE_CPUS)
    # Ray puts one in its place with each node that this process starts.
    signal.signal(signal.SIGTERM, handler)
    # There, and anywhere once it has gone.
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
    with ringloader.ray.Workers(2, num_cpus=0.1, scheduling_strategy=there) as workers:
        loader = DataLoader(Told(120, 0.02), batch_size=4, worker_pool=workers)
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                cluster.remove_node(node, allow_graceful=False)
    assert numbers(batches) == list(range(120))
    assert ringloader.report(loader).counters["replaced_workers"] >= 2


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import ray, ringloader, ringloader.ray
from cluster.datasets import Told
ray.init(address=sys.argv[1], log_to_driver=False)
workers = ringloader.ray.Workers(1)
iterator = iter(ringloader.DataLoader(Told(400, 0.01), batch_size=4, worker_pool=workers))
print(int(next(iterator)[1][0]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_actors_end_with_the_program_however_it_ends(cluster):
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, cluster.address, tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split()[-1])
    wait_for(lambda: not psutil.pid_exists(pid), 60)


def test_nothing_is_left_behind(cluster):
    assert cluster.address
    before = {process.pid for process in actors()}
    files = psutil.Process().num_fds()
    workers = ringloader.ray.Workers(1)
    loader = DataLoader(Told(100, 0.01), batch_size=4, worker_pool=workers)
    iterator = iter(loader)
    next(iterator)
    del iterator
    list(zip(loader, DataLoader(Told(16), batch_size=4, worker_pool=workers), strict=False))
    assert {process.pid for process in actors()} - before
    del loader, workers
    wait_for(lambda: not {process.pid for process in actors()} - before)
    # Ray's own connections come and go.
    wait_for(lambda: psutil.Process().num_fds() <= files + 8)
