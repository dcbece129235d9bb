"""``last_batch``: Gluon's semantics, on every path, over several epochs."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import ringloader
from ringloader import DataLoader, RolloverBatchSampler
from ringloader._sources import samplers
from ringloader._torch import select_path
from small_datasets import Stream

pytestmark = pytest.mark.rings_only

PATHS = ["native", "torch", "without workers"]


@pytest.fixture(params=PATHS)
def workers(request, monkeypatch):
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    return 0 if request.param == "without workers" else 2


class Counting(Sampler):
    """One that ringloader does not know."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


class Names(Counting):
    def __iter__(self):
        return (f"name {number}" for number in range(self.count))


class ByName:
    def __getitem__(self, name):
        return name


def batches(loader):
    return [batch.tolist() for batch in loader]


GLUONS = [
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
    [[9, 0, 1], [2, 3, 4], [5, 6, 7]],
    [[8, 9, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]],
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
]


@pytest.mark.parametrize("sampler", [None, Counting(10)], ids=["torch's sampler", "another"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_remainder_opens_the_next_epoch(workers, sampler, persistent):
    loader = DataLoader(
        range(10),
        batch_size=3,
        sampler=sampler,
        num_workers=workers,
        last_batch="rollover",
        persistent_workers=persistent and workers > 0,
    )
    for expected in GLUONS:
        assert len(loader) == len(expected)
        assert batches(loader) == expected
    assert loader.batch_size == 3


@pytest.mark.parametrize("last_batch", ["keep", "discard"])
@pytest.mark.parametrize("dataset", [range(10), Stream(range(5))], ids=["map", "iterable"])
def test_keep_and_discard_are_torchs_drop_last(workers, last_batch, dataset):
    drop_last = last_batch == "discard"
    ours = DataLoader(dataset, batch_size=3, num_workers=workers, last_batch=last_batch)
    theirs = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=workers, drop_last=drop_last)
    for _ in range(2):
        assert batches(ours) == batches(theirs)
    assert (ours.drop_last, ours.batch_sampler.drop_last) == (drop_last, drop_last)


def test_each_sample_comes_as_often_as_epochs_were_read(workers):
    torch.manual_seed(5)
    loader = DataLoader(range(10), batch_size=4, shuffle=True, num_workers=workers, last_batch="rollover")
    seen = [index for _ in range(6) for batch in batches(loader) for index in batch]
    assert len(seen) == 60
    # A batch may have samples of two epochs, in the order of those.
    for epoch in range(6):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(seen[start : start + 10]) for start in range(0, 60, 10)}) == 6


def test_an_abandoned_epoch_leaves_no_remainder(workers):
    """Gluon's sampler does so: it takes what was left at the first batch and leaves some at the end."""
    loader = DataLoader(range(100), batch_size=3, num_workers=workers, last_batch="rollover")
    assert len(batches(loader)) == 33
    iterator = iter(loader)
    assert next(iterator).tolist() == [99, 0, 1]
    del iterator
    assert batches(loader)[0] == [0, 1, 2]


def test_samples_without_numbers_roll_over():
    loader = DataLoader(ByName(), batch_size=3, sampler=Names(4), num_workers=1, last_batch="rollover")
    assert list(loader) == [["name 0", "name 1", "name 2"]]
    assert list(loader) == [["name 3", "name 0", "name 1"]]


def test_an_empty_dataset_and_one_smaller_than_a_batch(workers):
    loader = DataLoader(Sized(0), batch_size=3, num_workers=workers, last_batch="rollover")
    assert [list(loader), list(loader), len(loader)] == [[], [], 0]
    loader = DataLoader(range(2), batch_size=3, num_workers=workers, last_batch="rollover")
    assert [(len(loader), batches(loader)) for _ in range(3)] == [(0, []), (1, [[0, 1, 0]]), (1, [[1, 0, 1]])]


class Sized:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raise IndexError(index)


def random_sampler(rng):
    n, generator = rng.choice([1, 5, 32, 33, 100]), torch.Generator() if rng.random() < 0.5 else None
    kind = rng.choice(["sequential", "random", "replacement", "weighted", "distributed", "subset"])
    if kind == "subset":
        indices = rng.choice([range(n), [rng.choice([rng.randrange(9), "name", 2**70]) for _ in range(n)]])
        return SubsetRandomSampler(indices, generator), generator
    if kind == "sequential":
        return SequentialSampler(range(n)), None
    if kind == "distributed":
        return DistributedSampler(range(n), 3, rng.randrange(3), seed=rng.randrange(9)), None
    if kind == "weighted":
        return WeightedRandomSampler(torch.rand(n) + 0.1, rng.randint(1, 70), generator=generator), generator
    count = rng.choice([None, 1, n, n + 1, 65])
    return RandomSampler(range(n), kind == "replacement", count, generator), generator


def test_the_native_stream_is_the_sampler_in_python():
    """Batches, remainders and draws are equal, request by request, over several epochs and given up ones."""
    rng = random.Random(7)
    carried = 0
    for case in range(400):
        sampler, generator = random_sampler(rng)
        size = rng.choice([1, 2, 3, 7, 32])
        epochs = [rng.choice([None, None, rng.randint(0, 5)]) for _ in range(4)]
        found = []
        for is_native in (False, True):
            rolling = RolloverBatchSampler(sampler, size)
            torch.manual_seed(case)
            if generator is not None:
                generator.manual_seed(case)
            seen = []
            for requests in epochs:
                seen.append(("len", len(rolling)))
                advance = native(rolling) if is_native else iter(rolling).__next__
                for _ in itertools.count() if requests is None else range(requests):
                    batch = next_or_none(advance)
                    states = [torch.get_rng_state(), generator and generator.get_state()]
                    states = [None if state is None else hash(state.numpy().tobytes()) for state in states]
                    seen.append((batch, rolling.rest(), states))
                    if batch is None:
                        break
                carried += bool(rolling.rest())
            found.append(seen)
        assert found[0] == found[1], (case, sampler, size, epochs)
    assert carried > 200


def native(rolling):
    draws = samplers.draws_of(rolling)
    assert draws is not None, "it is not read natively"
    opened = []

    def advance():
        if not opened:
            opened.append(draws.open())
        return opened[0].next(draws)

    return advance


def next_or_none(advance):
    try:
        return advance()
    except StopIteration:
        return None


def test_a_batch_size_that_was_set_meanwhile_counts_from_the_next_epoch_on():
    rolling = RolloverBatchSampler(SequentialSampler(range(8)), 5)
    assert list(rolling) == [[0, 1, 2, 3, 4]]
    rolling.batch_size = 2
    assert samplers.draws_of(rolling).open() is None, "of what is left, whole batches come first"
    loader = DataLoader(range(8), batch_sampler=rolling, num_workers=1)
    assert batches(loader) == [[5, 6], [7, 0], [1, 2], [3, 4], [5, 6]]
    assert rolling.rest() == [7]


def test_of_a_subset_the_indices_of_its_epoch_are_left(workers):
    subset = SubsetRandomSampler([10, 11, 12, 13], torch.Generator())
    loader = DataLoader(range(50), batch_size=3, sampler=subset, num_workers=workers, last_batch="rollover")
    first = batches(loader)
    (left,) = {10, 11, 12, 13} - set(first[0])
    subset.indices = [20, 21]
    (second,) = batches(loader)
    assert (second[0], set(second[1:])) == (left, {20, 21})


def test_a_subset_whose_indices_go_while_it_is_read():
    """An index that is not there is an error of its request, and nothing is left."""
    subset = SubsetRandomSampler(list(range(5)))
    found = []
    for is_native in (False, True):
        torch.manual_seed(0)
        subset.indices = list(range(5))
        rolling = RolloverBatchSampler(subset, 2)
        advance = native(rolling) if is_native else iter(rolling).__next__
        seen = [advance(), advance()]
        subset.indices = []
        with pytest.raises(IndexError) as error:
            advance()
        found.append((seen, str(error.value), next_or_none(advance), rolling.rest()))
    assert found[0] == found[1]
    assert found[0][2:] == (None, [])


def test_what_a_subset_carries_over_is_the_same_objects():
    subset = SubsetRandomSampler([{number} for number in range(3)])
    rolling = RolloverBatchSampler(subset, 10)
    for _ in range(3):
        assert native(rolling)() is None
    left = rolling.rest()
    assert len(left) == 9
    assert all(sum(one is index for one in left) == 3 for index in subset.indices)


def test_copies_and_pickles_have_the_remainder():
    loader = DataLoader(range(10), batch_size=3, last_batch="rollover")
    list(loader)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert batches(other) == GLUONS[1]
    assert batches(loader) == GLUONS[1]


def test_what_makes_a_loader_anew_keeps_it():
    """By its batch sampler, as accelerate does; by a new sampler and by the arguments, as Lightning does."""
    loader = DataLoader(range(10), batch_size=3, last_batch="rollover")
    again = torch.utils.data.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    assert [batches(again), batches(again)] == GLUONS[:2]
    by = type(loader.batch_sampler)
    other = by(Counting(10), batch_size=loader.batch_size, drop_last=loader.batch_sampler.drop_last)
    again = DataLoader(range(10), batch_sampler=other, last_batch=loader.last_batch)
    assert [batches(again), batches(again)] == GLUONS[:2]
    again = DataLoader(
        range(10),
        batch_size=3,
        sampler=Counting(10),
        drop_last=loader.drop_last,
        last_batch=loader.last_batch,
    )
    assert [batches(again), batches(again)] == GLUONS[:2]


WHOLE = BatchSampler(SequentialSampler(range(4)), 3, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"last_batch": "roll"}, "last_batch must be 'keep', 'discard', 'rollover' or None, not 'roll'"),
        (
            {"last_batch": "keep", "drop_last": True},
            "last_batch='keep' and drop_last=True do not go together",
        ),
        ({"last_batch": "rollover", "drop_last": True}, "last_batch='rollover' and drop_last=True do not"),
        ({"last_batch": "discard", "batch_size": None}, "last_batch='discard' and batch_size=None do not"),
        ({"last_batch": "keep", "batch_sampler": WHOLE}, "last_batch='keep' and batch_sampler=<.*do not go"),
        ({"last_batch": "rollover", "batch_sampler": [[0, 1]]}, r"batch_sampler=\[\[0, 1\]\] do not go"),
    ],
)
def test_what_does_not_agree_is_said_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        DataLoader(range(4), **options)


def test_what_agrees_is_taken():
    assert DataLoader(range(4), last_batch="discard", drop_last=True).drop_last
    assert len(DataLoader(range(4), last_batch="discard", batch_sampler=WHOLE)) == 1
    with pytest.raises(ValueError, match="last_batch='rollover' and an IterableDataset do not go together"):
        DataLoader(Stream(range(5)), last_batch="rollover")
    with pytest.raises(ValueError, match="drop_last=True and last_batch='rollover'"):
        RolloverBatchSampler(range(4), 2, True)


@pytest.mark.parametrize("taken_by", ["install", "convert"])
def test_loaders_that_exist_have_their_batch_samplers(taken_by):
    with pytest.raises(
        TypeError, match="cannot take last_batch: pass it to DataLoader, or give the loader a ringloader"
    ):
        if taken_by == "install":
            ringloader.install(last_batch="keep")
        else:
            ringloader.convert(torch.utils.data.DataLoader(range(4)), last_batch="keep")
