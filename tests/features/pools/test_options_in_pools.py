"""Options in a process of a pool, which outlives the loader: none leaves anything there."""

import os
from pathlib import Path

import pytest

import ringloader
from faults.proc import wait_until
from parity.option_cases import CASES
from ringloader._features.table import TABLE
from small_datasets import Made

pytestmark = pytest.mark.rings_only

# Options that a loader has only from its constructor on, and those that say which processes it gets.
CONSTRUCTED = {"last_batch": "discard"}
NOT_HERE = {"worker_pool", "worker_method", "prefetch_epochs", "snapshot_every_n_steps"}
OPTIONS = {**{name: {name: value} for name, value in CONSTRUCTED.items()}, **CASES}
del OPTIONS["worker_method"]
OPTIONS["device_transform"] = {"device": "cpu", "device_transform": lambda batch: batch}
# Options of which the first loader leaves a handler for good, which does nothing for others.
STAYS = {"watchdog"}
_FIELDS = ("Umask", "Threads", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list", "NoNewPrivs", "Seccomp")


def where(_index):
    """The process that makes a sample."""
    return os.getpid()


def state_of(pid):
    """What a process shows of itself: its signals, its priority, its limits and its open files."""
    folder = Path("/proc") / str(pid)
    status = [line for line in (folder / "status").read_text().splitlines() if line.startswith(_FIELDS)]
    files = [str(file.readlink()) for file in (folder / "fd").iterdir()]
    limits = (folder / "limits").read_text()
    return status, os.getpriority(os.PRIO_PROCESS, pid), sorted(files), limits


def watched(pid):
    """True while the process has a file in which it tells what it does."""
    return any("memfd:ringloader-watchdog" in file for file in state_of(pid)[2])


def pids_of(loader):
    return {int(one) for batch in loader for one in batch}


def test_every_option_has_a_case():
    assert set(OPTIONS) | NOT_HERE == set(TABLE)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_process_of_a_pool_is_as_before(name):
    with ringloader.WorkerPool(1) as pool:
        dataset = Made(where, 4)
        plain = ringloader.DataLoader(dataset, worker_pool=pool)
        loader = ringloader.DataLoader(dataset, worker_pool=pool, **OPTIONS[name])
        pids = pids_of(plain)
        if name in STAYS:
            assert pids_of(loader) == pids
        (pid,) = pids
        assert wait_until(lambda: not watched(pid), 5)
        before = state_of(pid)
        assert pids_of(loader) == pids
        assert wait_until(lambda: state_of(pid) == before, 5), (before, state_of(pid))
        assert pids_of(plain) == pids, "the process works on"
