"""The memory of a list in eight workers beside one: a ``SharedList``, and a plain list that grows."""

import gc
import os
from pathlib import Path

import pytest
import torch

from faults.script import run_script
from ringloader import DataLoader, SharedList

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.slow,
    pytest.mark.cold("memory that a program shares with its server would count as half"),
]

ITEMS = 1_000_000
PARTS = 4


class Epochs:
    """First tasks in which the workers read nothing, then tasks in which each reads all."""

    def __init__(self, workers):
        self.workers = workers
        self.reads = False

    def __iter__(self):
        yield from (part if self.reads else -1 for part in range(PARTS) for _ in range(self.workers))

    def __len__(self):
        return PARTS * self.workers


class Read(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __getitem__(self, part):
        found = 0
        if part >= 0:
            for number in range(part, ITEMS, PARTS):
                found += len(self.items[number])
        return torch.tensor([os.getpid(), part, found])


def proportional(process):
    """Bytes in private memory, and in mappings of lists; each page that processes share in equal parts."""
    private = listed = 0
    lists = in_file = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if line.endswith("B") and line.split(":")[0] == "Pss":
            size = int(line.split()[1]) << 10
            listed += size if lists else 0
            private += 0 if in_file else size
        elif "-" in line.split()[0]:
            name = line.split(maxsplit=5)[5:]
            lists = bool(name) and "ringloader-items" in name[0]
            in_file = bool(name) and name[0].startswith("/")
    return private, listed


def taken(items, workers, method):
    """Bytes that reading all has added to private memory of all processes, and those in mappings of lists."""
    epochs = Epochs(workers)
    loader = DataLoader(
        Read(items),
        sampler=epochs,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    pids = {row[0] for row in map(torch.Tensor.tolist, loader)} | {os.getpid()}
    assert len(pids) == workers + 1
    before = [proportional(pid) for pid in pids]
    epochs.reads = True
    rows = [row.tolist() for row in loader]
    assert {row[0] for row in rows} == pids - {os.getpid()}
    assert sum(row[2] for row in rows) == workers * 60 * ITEMS
    after = [proportional(pid) for pid in pids]
    loader.shutdown()
    return sum(now[0] - then[0] for now, then in zip(after, before, strict=True)), sum(
        row[1] for row in after
    )


def of_a_shared_list(method):
    # A collection writes to the page of every object there is, which a forked worker then has for itself.
    gc.freeze()
    items = SharedList(f"{number:060}" for number in range(ITEMS))
    one = taken(items, 1, method)
    for _ in range(3):
        eight = taken(items, 8, method)
        # A process that had pages with them and ends meanwhile leaves them its part.
        if sum(eight) < 1.1 * items.nbytes:
            break
    print(items.nbytes, *one, *eight)  # noqa: T201


def of_a_plain_list():
    gc.freeze()
    before = proportional("self")[0]
    items = [f"{number:060}" for number in range(ITEMS)]
    size = proportional("self")[0] - before
    print(size, *(size + taken(items, workers, "fork")[0] for workers in (1, 8)))  # noqa: T201


def printed(call, folder):
    """Returns what the function prints in a program of its own, without pytest and other tests."""
    ended = run_script(
        "ringloader",
        f"""
        from data.test_shared_list_memory import *
        if __name__ == "__main__":
            {call}
        """,
        folder,
    )
    assert ended.code == 0, ended.err
    return list(map(int, ended.out.split()))


def say(what, one, eight):
    print(f"\n{what}: {one / 1e6:.1f} MB with 1 worker, {eight / 1e6:.1f} MB with 8")  # noqa: T201


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_eight_workers_take_what_one_takes(method, tmp_path):
    nbytes, *found = printed(f"of_a_shared_list({method!r})", tmp_path)
    one, eight = found[:2], found[2:]
    say(f"SharedList, {method}", sum(one), sum(eight))
    assert 0.99 * nbytes < one[1] <= 1.01 * nbytes, "the mapping is not measured"
    assert sum(eight) < 1.1 * sum(one), (one, eight, nbytes)
    assert sum(eight) < 1.1 * nbytes


def test_a_plain_list_grows(tmp_path):
    size, one, eight = printed("of_a_plain_list()", tmp_path)
    say("list, fork", one, eight)
    assert size > 80_000_000
    assert eight > 2 * one, (one, eight, size)
