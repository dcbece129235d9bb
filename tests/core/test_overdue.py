"""The error of a batch that does not come in time: torch's words, and what is late."""

import contextlib
import re

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

import ringloader
from faults.failing_datasets import Waits, WaitsInOne
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only


@pytest.fixture(params=["native", "ahead"])
def path(request):
    return request.param


@pytest.fixture
def released(tmp_path):
    """The file that datasets wait for."""
    file = tmp_path / "released"
    yield file
    file.touch()


def made(path, dataset, **options):
    options = {"num_workers": 2, "timeout": 0.4, **options}
    if path == "ahead":
        options["main_prefetch"] = 2
    return DataLoader(dataset, **options)


def late(iterator, count, released):
    """The batches before the one that does not come, and the notes of the error for it. Then it comes."""
    got = []
    while True:
        try:
            got.append(next(iterator))
        except RuntimeError as error:
            assert str(error) == "DataLoader timed out after 0.4 seconds"
            error.__traceback__ = None
            # On a busy machine, others may be late too; they come.
            if len(got) == count:
                released.touch()
                # Behind these, what each of them does: `faults/test_watchdog.py`.
                return got, [note for note in error.__notes__ if "\n" not in note]


def test_worker_batch_and_indices_are_named(path, released):
    iterator = iter(made(path, Waits({13}, released), batch_size=4, shuffle=False))
    assert ringloader.report(iterator).path == "native"
    _, notes = late(iterator, 3, released)
    pid = iterator._workers[1].pid
    assert notes == [
        f"worker 1 (pid {pid}) is late with batch 3 of the epoch: dataset indices [12, 13, 14, 15]"
    ]
    batch = None
    while batch is None:
        with contextlib.suppress(RuntimeError):
            batch = next(iterator)
    assert batch.tolist() == [12, 13, 14, 15], "it may be asked again"


def test_after_many_batches_and_epochs(path, released):
    """Indices of tasks that were answered are forgotten, and those of the last epoch are no others'."""
    dataset = Waits({1000}, released, 1003)
    loader = made(path, dataset, batch_size=2, persistent_workers=True)
    iterator = iter(loader)
    with contextlib.suppress(RuntimeError):
        for _ in range(7):
            next(iterator)
    _, notes = late(iter(loader), 500, released)
    assert re.sub(r"pid \d+", "pid", notes[0]) == (
        "worker 0 (pid) is late with batch 500 of the epoch: dataset indices [1000, 1001]"
    )


def test_out_of_order_all_that_are_late_are_named(path, released):
    dataset = Waits(range(4, 40), released)
    iterator = iter(made(path, dataset, batch_size=None, in_order=False))
    got, notes = late(iterator, 4, released)
    assert sorted(got) == [0, 1, 2, 3]
    found = [
        re.fullmatch(r"worker (\d) \(pid \d+\) is late with batch (\d) .* index (\d)", one) for one in notes
    ]
    assert [one[1] for one in found] == ["0", "1"]
    assert all(one[2] == one[3] for one in found)
    # Whichever worker was the first to answer has batch 4.
    first, second = sorted(one[2] for one in found)
    assert first == "4" < second


def test_an_iterable_dataset_has_no_indices(path, released):
    iterator = iter(made(path, WaitsInOne(released), batch_size=None))
    got, notes = late(iterator, 2, released)
    assert got == [0, 1]
    assert notes == [f"worker 1 (pid {iterator._workers[1].pid}) is late with its next batch"]


def test_no_more_indices_than_can_be_read(path, released):
    iterator = iter(made(path, Waits({30}, released, 60), batch_size=30))
    _, notes = late(iterator, 1, released)
    assert f"dataset indices {list(range(30, 46))} and 14 more" in notes[0]


class Names:
    """A sampler whose indices must be pickled."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([("a", 0), ("b", 1), ("c", 2)])


class ByName(Waits):
    def __getitem__(self, index):
        return super().__getitem__(index[1])


def test_indices_of_any_kind(path, released):
    iterator = iter(made(path, ByName({1}, released), batch_size=None, sampler=Names()))
    _, notes = late(iterator, 1, released)
    assert notes[0].endswith("batch 1 of the epoch: dataset index ('b', 1)")


def test_a_sampler_of_ones_own(path, released):
    class Halves(BatchSampler):
        def __iter__(self):
            yield [20, 0]
            yield [21, 1]

    sampler = Halves(SequentialSampler(range(40)), 2, False)
    iterator = iter(made(path, Waits({1}, released), batch_sampler=sampler))
    _, notes = late(iterator, 1, released)
    assert notes[0].endswith("dataset indices [21, 1]")
