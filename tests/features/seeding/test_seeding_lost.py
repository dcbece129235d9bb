"""``seeding=`` where samples raise, workers are lost or batches are late."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
from seeding_parts import (
    WAYS,
    Drawing,
    N,
    flat,
    made,
    samples,
)

import ringloader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Failing(Drawing):
    """One index raises the first times, having drawn."""

    def __init__(self, bad, times):
        super().__init__()
        self.bad = bad
        self.times = times

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if index == self.bad and self.times:
            self.times -= 1
            raise ValueError("a bad sample")
        return found


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("way", ["none", "one", "threads"])
def test_a_sample_that_raises_leaves_the_others_as_they_are(way, size):
    options = {**WAYS[way], "batch_size": size, "collate_fn": None if size is None else list}
    options["num_workers"] = min(1, options.get("num_workers", 0))
    whole = samples(range(N), is_thread=way == "threads")

    def got(bad, **on_error):
        found = list(made(bad, **options, **on_error))
        return [tuple(sample) for sample in (found if size is None else flat(found))]

    assert got(Failing(6, 99), on_error="skip") == whole[:6] + whole[7:]
    # Asked for again, it is the sample that it would have been.
    assert got(Failing(6, 2), on_error=ringloader.Retry(2, backoff=0)) == whole
    replaced = got(Failing(6, 99), on_error=lambda index, _error: (index, "another"))
    assert replaced == [*whole[:6], (6, "another"), *whole[7:]]


class DiesOnce(Drawing):
    """A worker ends at some indices, at the first visit."""

    def __init__(self, marks, bad=(5, 13)):
        super().__init__()
        self.marks = Path(marks)
        self.bad = bad

    def __getitem__(self, index):
        mark = self.marks / str(index)
        if index in self.bad and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [1, 4])
def test_a_worker_that_is_started_again_sets_the_same_seeds(tmp_path, size, caplog):
    with caplog.at_level(logging.WARNING, "ringloader"):
        got = flat(made(DiesOnce(tmp_path), num_workers=2, restart_workers=2, batch_size=size))
    assert got == samples(range(N))
    text = "\n".join(caplog.messages)
    assert len(list(tmp_path.iterdir())) == 2 and "dataset indices [" in text and "Placed" not in text


def test_the_error_of_a_lost_worker_names_the_index(tmp_path):
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        flat(made(DiesOnce(tmp_path), num_workers=2, batch_size=2))
    assert [note for note in caught.value.__notes__ if note.startswith("it was in")] == [
        "it was in batch 2 of the epoch: dataset indices [4, 5]"
    ]


class Slow(Drawing):
    def __getitem__(self, index):
        if index == 5:
            time.sleep(0.6)
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("way", ["two", "threads"])
def test_what_is_said_of_a_late_batch_names_the_index(way, in_order, caplog):
    with caplog.at_level(logging.WARNING, "ringloader"):
        loader = made(Slow(), batch_size=2, watchdog=0.2, in_order=in_order, **WAYS[way])
        assert len(flat(loader)) == N
    text = "\n".join(caplog.messages)
    assert "dataset indices [4, 5]" in text and "Placed" not in text
