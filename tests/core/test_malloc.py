"""Large arrays that a worker makes and frees: the same pages again, unless the user says otherwise."""

import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import pytest
import torch

from programs import client
from ringloader import CachedDataset, DataLoader
from ringloader._worker import entry

MEBI = 1 << 20


class Fresh:
    """Makes a tensor of 40 MB anew; gives page faults that this took, and the process's own memory in MiB."""

    def __init__(self):
        self.source = torch.zeros(10 * MEBI)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made = self.source.clone()
        assert made.numel() == 10 * MEBI
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, anonymous_mib()


def anonymous_mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) >> 10


class Read:
    """Reads samples of 600 KB from a cache; gives the page faults that each took."""

    def __init__(self):
        self.cached = CachedDataset([torch.zeros(150_000)] * 256)

    def __len__(self):
        return len(self.cached)

    def __getitem__(self, index):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        sample = self.cached[index]
        return sample, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


# The largest default of shared memory differs from machine to machine.
MUCH = 4096 * MEBI


# No environment for a worker by fork: the test's own is cleaned of what would matter.
@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    for name in ("RINGLOADER_MALLOC", *entry._TUNINGS):
        monkeypatch.delenv(name, raising=False)


def late_items(max_shared_bytes=MUCH, batch_size=None, **variables):
    """Of the last tasks of a worker with these variables: the first tasks warm the memory up.

    In a program of its own: a process that has run other tests may have room for the arrays in a gap of its
    heap, where they make no page fault.
    """
    ended = client.run(
        [__file__, str(max_shared_bytes), *([] if batch_size is None else [str(batch_size)])],
        timeout=60,
        stdout=-1,
        text=True,
        env=dict(os.environ),
        variables=variables,
    )
    assert ended.returncode == 0
    return json.loads(ended.stdout)


def test_pages_are_kept():
    kept = late_items()
    others = {
        "not by ringloader": late_items(RINGLOADER_MALLOC="0"),
        "tuned by a variable": late_items(MALLOC_TRIM_THRESHOLD_="1"),
        "tuned": late_items(GLIBC_TUNABLES="1"),
        "small shared memory": late_items(max_shared_bytes=256 * MEBI),
    }
    faults = {name: sum(found for found, _ in items) for name, items in others.items()}
    assert sum(found for found, _ in kept) * 10 < min(faults.values()), faults
    # Though glibc spreads them over more: the pages of the others are given back.
    own = max(memory for _, memory in others["not by ringloader"])
    assert max(memory for _, memory in kept) <= own + 2 * 40 + 20


def test_cached_samples_of_large_batches_keep_their_pages():
    """Also where all samples of a batch, which come and go together, take more than 64 MiB."""
    small, large = (late_items(batch_size=batch_size) for batch_size in (64, 128))
    assert sum(large) / len(large) < sum(small) / len(small) + 20


def own_mib(pid):
    """Memory of the process that no other has."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"Private_Dirty:\s+(\d+)", rollup).group(1)) >> 10


def test_an_idle_worker_gives_it_back():
    loader = DataLoader(Fresh(), batch_size=None, num_workers=1, max_shared_bytes=MUCH)
    iterator = iter(loader)
    # The trim at the 8th task is over, and the next one is far.
    for _ in range(10):
        next(iterator)
    (worker,) = iterator._workers
    before = own_mib(worker.pid)
    deadline = time.monotonic() + 20
    while own_mib(worker.pid) > before - 40 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert own_mib(worker.pid) <= before - 40


if __name__ == "__main__":
    options = {"num_workers": 1, "max_shared_bytes": int(sys.argv[1])}
    if sys.argv[2:]:
        loader = DataLoader(Read(), int(sys.argv[2]), persistent_workers=True, **options)
        epochs = [[found for _, faults in loader for found in faults.tolist()] for _ in range(4)]
        items = epochs[2] + epochs[3]
    else:
        items = list(DataLoader(Fresh(), batch_size=None, **options))[33:]
    sys.stdout.write(json.dumps(items))
