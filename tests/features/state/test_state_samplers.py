"""``state_dict`` over other samplers, out of order, and by other numbers of ranks."""

import itertools
import json
import multiprocessing
import weakref

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

import ringloader
from features.state.test_state import Numbers, flat, through_json

N = 23


class Plain(Sampler):
    """Shuffles by its epoch, and has no state."""

    def __init__(self, length=N):
        self.length = length

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(3)).tolist())

    def __len__(self):
        return self.length


class Stateful(Plain):
    """Counts what it has given, and goes on there. A second epoch has another order."""

    def __init__(self, length=N):
        super().__init__(length)
        self.epoch = 0
        self.at = 0
        self.asked = 0

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < self.length:
            self.at += 1
            self.asked += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class IteratorWithState(Plain):
    def __iter__(self):
        return Counted(self.length)


class Counted:
    def __init__(self, length):
        self.length, self.at = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.length - self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Batches:
    """A batch sampler of its own, with batches of different sizes."""

    def __init__(self, length=N):
        self.length = length

    def __iter__(self):
        indices = iter(range(self.length))
        for size in itertools.cycle((3, 1, 4)):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch

    def __len__(self):
        return len(list(iter(self)))


KINDS = {
    "plain": lambda: {"sampler": Plain(), "batch_size": 4},
    "plain, cut": lambda: {"sampler": Plain(), "batch_size": 4, "drop_last": True},
    "a list": lambda: {"sampler": list(range(3, N)), "batch_size": 4},
    "strings": lambda: {"sampler": [str(number) for number in range(N)], "batch_size": 4},
    "state": lambda: {"sampler": Stateful(), "batch_size": 4},
    "its iterator's": lambda: {"sampler": IteratorWithState(), "batch_size": 4},
    "no batches": lambda: {"sampler": Plain(), "batch_size": None},
    "state, no batches": lambda: {"sampler": Stateful(), "batch_size": None},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(Stateful(), 5, False)},
    "its own batches": lambda: {"batch_sampler": Batches()},
}


def built(kind, cls=ringloader.StatefulDataLoader, **options):
    return cls(
        Numbers(), collate_fn=list if kind.find("no batches") < 0 else None, **KINDS[kind](), **options
    )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_of_another_kind(kind, workers):
    torchs = built(kind, torch.utils.data.DataLoader)
    whole, second = list(torchs), list(torchs)
    for stop in (0, 1, 3, len(whole)):
        stopped = built(kind, num_workers=workers)
        iterator = iter(stopped)
        got = list(itertools.islice(iterator, stop))
        state = through_json(stopped.state_dict())
        assert state["_num_yielded"] == stop
        resumed = built(kind, num_workers=workers)
        resumed.load_state_dict(state)
        assert got + list(resumed) == whole
        assert list(resumed) == second
        if stop == len(whole):
            continue
        # A state of the rest is one of the epoch.
        again = built(kind, num_workers=workers)
        again.load_state_dict(state)
        more = list(itertools.islice(iter(again), 1))
        resumed.load_state_dict(again.state_dict())
        assert got + more + list(resumed) == whole


def test_an_index_alone_has_the_place_of_torchs_samplers():
    fingerprints = []
    for sampler in (list(range(N)), torch.utils.data.SequentialSampler(range(N))):
        loader = ringloader.StatefulDataLoader(Numbers(), batch_size=None, sampler=sampler)
        list(itertools.islice(loader, 5))
        fingerprints.append(loader.fingerprint())
    assert fingerprints[0] == fingerprints[1]


def test_a_sampler_with_a_state_is_not_read_again():
    loader = built("state", num_workers=2)
    list(itertools.islice(iter(loader), 3))
    resumed = built("state")
    resumed.load_state_dict(loader.state_dict())
    assert len(flat(resumed)) == N - 12
    assert resumed.sampler.asked == N - 12


def test_the_state_of_a_sampler_is_a_copy():
    class Aliased(Stateful):
        def state_dict(self):
            self.kept = getattr(self, "kept", {})
            self.kept.update(super().state_dict())
            return self.kept

    loader = ringloader.StatefulDataLoader(Numbers(), sampler=Aliased(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = json.dumps(state)
    list(iterator)
    assert json.dumps(state) == before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("plain", {"sampler": Plain(N - 1), "batch_size": 4}),
        ("plain", {"sampler": Plain(7), "batch_size": 4}),
        ("no batches", {"sampler": Plain(1), "batch_size": None}),
        ("its own batches", {"batch_sampler": [[0, 1], [2, 3], [4]]}),
        ("its own batches", {"batch_sampler": Batches(3)}),
    ],
)
def test_other_indices_of_another_sampler_are_refused(kind, other, workers):
    loader = built(kind)
    list(itertools.islice(iter(loader), 2))
    state = loader.state_dict()
    state["sampler"] = type(other.get("sampler", other.get("batch_sampler"))).__name__
    resumed = ringloader.StatefulDataLoader(Numbers(), num_workers=workers, **other)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=f"are not those that the {state['sampler']} gives now"):
        next(iter(resumed))


def test_an_edited_number_of_batches():
    for kind, sizes in (("plain", 4), ("state", 4), ("no batches", 1)):
        whole = list(built(kind))
        loader = built(kind)
        list(itertools.islice(iter(loader), 3))
        state = loader.state_dict()
        state["_num_yielded"] -= 1
        resumed = built(kind)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[2:], (kind, sizes)


class Slow(Numbers):
    """Holds one sample back until it is wanted, so that the batches of another worker overtake it."""

    def __init__(self, length=40, late=9):
        super().__init__(length)
        self.late = late
        self.wanted = multiprocessing.Event()

    def __getitem__(self, index):
        if index == self.late:
            assert self.wanted.wait(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_batches_that_were_overtaken(method):
    given = {"num_workers": 2, "in_order": False, "collate_fn": list, "worker_method": method}
    slow = Slow()
    loader = ringloader.StatefulDataLoader(slow, batch_size=4, **given)
    iterator = iter(loader)
    got = flat(itertools.islice(iterator, 5))
    state = through_json(loader.state_dict())
    assert 9 not in got
    assert state["overtaken"]
    assert state["samples"] <= 8
    assert state["_num_yielded"] == 5
    slow.wanted.set()
    for size, workers in ((4, 2), (3, 0), (50, 1)):
        resumed = ringloader.StatefulDataLoader(slow, batch_size=size, collate_fn=list, num_workers=workers)
        resumed.load_state_dict(state)
        rest = flat(resumed)
        assert sorted(got + rest) == list(range(40))
        assert rest == sorted(rest)
    for _ in iterator:
        pass
    finished = loader.state_dict()
    assert (finished["samples"], finished["overtaken"], finished["_iterator_finished"]) == (40, [], True)


@pytest.mark.parametrize("kind", ["state", "its iterator's", "plain"])
def test_a_sampler_behind_batches_that_were_overtaken(kind):
    # Of one sample each: the second one is held back, and then read from the state, alone.
    sampler = KINDS[kind]()["sampler"]
    order = list(KINDS[kind]()["sampler"])
    slow = Slow(N, late=order[1])
    given = {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "collate_fn": list}
    loader = ringloader.StatefulDataLoader(slow, sampler=sampler, **given)
    # Its workers stay: one that ends while it waits for an event would keep `set` waiting.
    iterator = iter(loader)
    got = flat(itertools.islice(iterator, 2))
    state = loader.state_dict()
    slow.wanted.set()
    for _ in iterator:
        pass
    assert (state["samples"], state["overtaken"]) == (1, [2, 3])
    for number in (1, 2, N):
        resumed = ringloader.StatefulDataLoader(slow, sampler=KINDS[kind]()["sampler"], collate_fn=list)
        resumed.load_state_dict(state)
        got += flat(itertools.islice(iter(resumed), number))
        state = resumed.state_dict()
    assert got == [order[0], order[2], order[1], *order[3:]]


def distributed(rank, ranks, length=N, **options):
    data = Numbers(length)
    sampler = DistributedSampler(data, ranks, rank, seed=2, **options)
    return ringloader.StatefulDataLoader(data, batch_size=2, sampler=sampler, collate_fn=list)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 2), (2, 3), (1, 4), (4, 1)])
def test_other_numbers_of_ranks(before, after, drop_last):
    order = [flat(distributed(rank, before, drop_last=drop_last)) for rank in range(before)]
    first = [distributed(rank, before, drop_last=drop_last) for rank in range(before)]
    got = [flat(itertools.islice(iter(loader), 2)) for loader in first]
    states = [through_json(loader.state_dict()) for loader in first]
    whole = flat(distributed(0, 1))
    consumed = 4 * before
    assert sorted(itertools.chain.from_iterable(got)) == sorted(whole[:consumed])
    for rank in range(after):
        rest = []
        for state in states:
            resumed = distributed(rank, after, drop_last=drop_last)
            assert len(resumed) == len(distributed(rank, after, drop_last=drop_last))
            resumed.load_state_dict(state)
            rest.append(flat(resumed))
        assert all(one == rest[0] for one in rest)
        left = N - consumed
        many = left // after if drop_last else -(-left // after)
        expected = [(whole + whole)[consumed + rank + at * after] for at in range(many)]
        assert rest[0] == expected
        if before == after:
            assert got[rank] + rest[0] == order[rank]


def test_fingerprints_of_ranks_add_up():
    def total(loaders):
        return sum(loader.fingerprint() for loader in loaders) % (1 << 64)

    alone = distributed(0, 1, length=24)
    ranks = [distributed(rank, 3, length=24) for rank in range(3)]
    assert [loader.fingerprint() for loader in (alone, *ranks)] == [0, 0, 0, 0]
    list(itertools.islice(iter(alone), 6))
    for loader in ranks:
        list(itertools.islice(iter(loader), 2))
    assert total(ranks) == alone.fingerprint() != 0
    resumed = [distributed(rank, 3, length=24) for rank in range(3)]
    for loader, first in zip(resumed, ranks, strict=True):
        loader.load_state_dict(first.state_dict())
        list(loader)
    whole = distributed(0, 1, length=24)
    list(whole)
    assert total(resumed) == whole.fingerprint()
    # Any rank's state serves all ranks, and has the sum of its own.
    state = ranks[1].state_dict()
    other = distributed(0, 3, length=24)
    other.load_state_dict(state)
    list(other)
    assert other.fingerprint() is None
    before = total(ranks)
    others = [distributed(rank, 2, length=24) for rank in range(2)]
    for loader in others:
        loader.load_state_dict(state)
        list(loader)
    assert (before + total(others)) % (1 << 64) == whole.fingerprint()


def test_fingerprints_of_what_was_returned():
    loader = ringloader.StatefulDataLoader(Numbers(8, bad=5), batch_size=2, collate_fn=list)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    two = loader.fingerprint()
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    assert loader.fingerprint() == two
    last = next(iterator)
    assert last == [6, 7]
    whole = ringloader.StatefulDataLoader(Numbers(8), batch_size=2, collate_fn=list)
    assert list(whole)[3] == last
    assert loader.fingerprint() not in (two, whole.fingerprint())
    strings, others = built("strings"), built("strings")
    next(iter(strings)), next(iter(others))
    assert strings.fingerprint() == others.fingerprint() not in (None, 0)


@pytest.mark.parametrize("kind", ["plain", "state", None])
def test_a_state_keeps_no_loader(kind):
    given = {"shuffle": True, "generator": torch.Generator()} if kind is None else KINDS[kind]()
    loader = ringloader.StatefulDataLoader(Numbers(), **given)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    gone = weakref.ref(loader)
    del loader
    assert gone() is None


class Bad(Numbers):
    """Every third sample is bad."""

    def __getitem__(self, index):
        if index % 3 == 2:
            raise ValueError(f"sample {index}")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_were_left_out(workers):
    given = {"batch_size": 1, "collate_fn": list, "num_workers": workers, "on_error": "skip"}
    loader = ringloader.StatefulDataLoader(Bad(12), **given)
    iterator = iter(loader)
    assert flat(itertools.islice(iterator, 3)) == [0, 1, 3]
    returned = loader.fingerprint()
    state = loader.state_dict()
    assert (state["_num_yielded"], state["samples"], state["bad_samples"]) == (4, 4, 1)
    resumed = ringloader.StatefulDataLoader(Bad(12), **given)
    resumed.load_state_dict(state)
    assert flat(resumed) == [4, 6, 7, 9, 10]
    assert resumed.state_dict()["bad_samples"] == 4
    good = ringloader.StatefulDataLoader(Numbers(12), batch_size=1, sampler=[0, 1, 2, 3])
    list(good)
    assert returned not in (good.fingerprint(), 0)
    few = ringloader.StatefulDataLoader(Bad(12), **given, max_errors=3)
    few.load_state_dict(state)
    with pytest.raises(ValueError, match="sample 11") as raised:
        list(few)
    assert "max_errors=3 is exceeded: bad sample 4 of this epoch" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rest_of_bad_samples_only(workers):
    given = {"collate_fn": list, "num_workers": workers, "on_error": "skip"}
    loader = ringloader.StatefulDataLoader(Bad(6), **given)
    iterator = iter(loader)
    assert flat(itertools.islice(iterator, 4)) == [0, 1, 3, 4]
    state = loader.state_dict()
    assert list(iterator) == []
    resumed = ringloader.StatefulDataLoader(Bad(6), **given)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert [bad.index for bad in resumed.errors] == [5]
    # An epoch that is all bad still raises.
    none = ringloader.StatefulDataLoader(Bad(6), sampler=[2, 5], **given)
    none.load_state_dict(none.state_dict())
    with pytest.raises(ValueError, match="sample 2"):
        list(none)


class Noisy(Numbers):
    def __getitem__(self, index):
        return index, float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "state", "its own batches", "no batches", None])
def test_augmentation_goes_on(kind, workers):
    given = {"shuffle": True, "batch_size": 4} if kind is None else KINDS[kind]()
    torch.manual_seed(5)

    def made(**options):
        collate = None if given.get("batch_size", 1) is None else list
        return ringloader.StatefulDataLoader(
            Noisy(), collate_fn=collate, seeding="sample", **given, **options
        )

    loader = made(num_workers=workers)
    list(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = through_json(loader.state_dict())
    rest = list(iterator)
    third = list(loader)
    given = {"shuffle": True, "batch_size": 4} if kind is None else KINDS[kind]()
    resumed = made(num_workers=2 - workers)
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    if kind != "state":
        assert [type(one) for one in list(resumed)] == [type(one) for one in third]


class Backwards(Sampler):
    """A sampler of the program's, which Python iterates."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices[::-1])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_remainder_of_a_sampler_of_the_programs_is_in_the_state(workers):
    def made():
        indices = list(range(10))
        return ringloader.StatefulDataLoader(
            range(10), 4, sampler=Backwards(indices), last_batch="rollover", num_workers=workers
        )

    loader = made()
    for _ in range(4):
        # Between two epochs, and within one.
        state, resumed = loader.state_dict(), made()
        resumed.load_state_dict(state)
        iterator = iter(loader)
        first = next(iterator).tolist()
        within = loader.state_dict()
        rest = [batch.tolist() for batch in iterator]
        assert [batch.tolist() for batch in resumed] == [first, *rest]
        resumed = made()
        resumed.load_state_dict(within)
        assert [batch.tolist() for batch in resumed] == rest


def test_a_remainder_of_other_indices_than_numbers_is_no_obstacle():
    words = {"a": 1, "b": 2, "c": 3}
    loader = ringloader.StatefulDataLoader(words, 2, sampler=Backwards(list(words)), last_batch="rollover")
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[3, 2]], [[1, 3], [2, 1]]]


@pytest.mark.parametrize("workers", [0, 1])
def test_another_batch_size_would_leave_another_remainder(workers):
    def made(batch_size):
        generator = torch.Generator().manual_seed(0)
        return ringloader.StatefulDataLoader(
            range(11), batch_size, True, generator=generator, last_batch="rollover", num_workers=workers
        )

    loader = made(4)
    list(loader)
    finished = loader.state_dict()
    next(iter(loader))
    within = loader.state_dict()
    for state, batch_size in ((finished, 5), (within, 3), (within, 5)):
        with pytest.raises(ValueError, match=f"batches of {batch_size} in place of 4"):
            made(batch_size).load_state_dict(state)
