"""``state_dict`` and ``load_state_dict`` beside torch's loader, which runs the whole epoch."""

import copy
import gc
import itertools
import json
import pickle

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import ringloader

N = 23


class Numbers(torch.utils.data.Dataset):
    """Counts what was read."""

    def __init__(self, length=N, bad=None):
        self.length = length
        self.bad = bad
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads.append(index)
        if index == self.bad:
            raise ValueError("a bad sample")
        return index


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


# By the dataset, and whether there are generators.
SAMPLERS = {
    "sequential": lambda _data, _has: {},
    "random": lambda _data, has: {"shuffle": True, "generator": seeded() if has else None},
    "its own": lambda data, has: {"sampler": RandomSampler(data, generator=seeded(3) if has else None)},
    "more": lambda data, has: {
        "sampler": RandomSampler(data, num_samples=2 * N + 5, generator=seeded(3) if has else None)
    },
    "replacement": lambda data, has: {
        "sampler": RandomSampler(data, True, 70, generator=seeded(3) if has else None),
        "generator": seeded() if has else None,
    },
    "subset": lambda _data, has: {
        "sampler": SubsetRandomSampler(range(2, N), generator=seeded(3) if has else None)
    },
    "weighted": lambda _data, has: {
        "sampler": WeightedRandomSampler(
            [1.0 + i for i in range(N)], 30, generator=seeded(3) if has else None
        )
    },
    "distributed": lambda data, has: {"sampler": DistributedSampler(data, 3, 1, seed=5 if has else 0)},
    "batches": lambda data, has: {
        "batch_sampler": BatchSampler(RandomSampler(data, generator=seeded(3) if has else None), 4, True)
    },
}


def built(cls, kind, has_generator, data=None, size=4, **options):
    data = Numbers() if data is None else data
    given = SAMPLERS[kind](data, has_generator)
    if "batch_sampler" not in given:
        given["batch_size"] = size
    return cls(data, collate_fn=list, **given, **options)


def flat(batches):
    return [int(index) for index in itertools.chain.from_iterable(batches)]


def through_json(state):
    return json.loads(json.dumps(state))


WORKERS = [(0, {}), (2, {"num_workers": 2}), (3, {"num_workers": 3, "worker_method": "thread"})]


@pytest.mark.parametrize("has_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    ("saver", "resumer"),
    [(0, 0), (0, 1), pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_the_rest_and_later_epochs_are_torchs(kind, has_generator, saver, resumer):
    workers, options = WORKERS[saver]
    for stop in (0, 1, 2):
        torch.manual_seed(11)
        whole = built(torch.utils.data.DataLoader, kind, has_generator, num_workers=workers)
        epochs = [flat(whole) for _ in range(3)]
        after = torch.get_rng_state()

        torch.manual_seed(11)
        stopped = built(ringloader.StatefulDataLoader, kind, has_generator, **options)
        assert flat(stopped) == epochs[0]
        iterator = iter(stopped)
        got = flat(itertools.islice(iterator, stop))
        before = torch.get_rng_state()
        state = through_json(stopped.state_dict())
        assert torch.equal(torch.get_rng_state(), before)
        assert (state["_num_yielded"], state["samples"]) == (stop, len(got))
        del iterator

        torch.manual_seed(99)
        data = Numbers()
        resumed = built(ringloader.StatefulDataLoader, kind, has_generator, data, **WORKERS[resumer][1])
        resumed.load_state_dict(state)
        torch.set_rng_state(before)
        assert through_json(resumed.state_dict()) == state
        rest = flat(resumed)
        assert got + rest == epochs[1]
        if resumer == 0:
            assert data.reads == rest
        assert flat(resumed) == epochs[2]
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "batches"])
def test_the_rest_is_regrouped(kind):
    torch.manual_seed(2)
    loader = built(ringloader.StatefulDataLoader, kind, False)
    iterator = iter(loader)
    got = flat(itertools.islice(iterator, 2))
    state = loader.state_dict()
    rest = flat(iterator)
    for size in (1, 5, 100):
        resumed = built(ringloader.StatefulDataLoader, kind, False, size=size)
        resumed.load_state_dict(state)
        batches = list(resumed)
        assert flat(batches) == rest
        assert {len(batch) for batch in batches[:-1]} <= {size}
    assert len(got) == 8


def test_no_batches():
    torch.manual_seed(2)
    for given in ({}, {"shuffle": True}):
        loader = ringloader.StatefulDataLoader(Numbers(), batch_size=None, **given)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        resumed = ringloader.StatefulDataLoader(Numbers(), batch_size=None, **given)
        resumed.load_state_dict(state)
        assert list(resumed) == list(iterator)


def test_a_resumed_epoch_is_resumed_again():
    loader = built(ringloader.StatefulDataLoader, "random", False, num_workers=2)
    whole, iterator = [], iter(loader)
    for _ in range(3):
        whole += next(iterator)
        state = loader.state_dict()
        loader = built(ringloader.StatefulDataLoader, "random", False)
        loader.load_state_dict(state)
        iterator = iter(loader)
    assert state["_num_yielded"] == 3
    assert sorted(flat([whole, *iterator])) == list(range(N))


def test_workers_get_the_epochs_seed():
    loader = built(ringloader.StatefulDataLoader, "random", False, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    resumed = built(ringloader.StatefulDataLoader, "random", False, num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert iter(resumed)._base_seed == iterator._base_seed


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_edges_of_an_epoch(options):
    def fresh():
        return built(ringloader.StatefulDataLoader, "random", True, **options)

    whole = fresh()
    epochs = [list(whole) for _ in range(3)]
    loader = fresh()
    beginning = loader.state_dict()
    assert loader._iterator is None
    iterator = iter(loader)
    for _ in epochs[0]:
        next(iterator)
    last = loader.state_dict()
    assert next(iterator, None) is None
    over = loader.state_dict()
    assert (last["_iterator_finished"], over["_iterator_finished"]) == (False, True)
    for state, expected in ((beginning, epochs[:2]), (last, [[], epochs[1]]), (over, epochs[1:])):
        resumed = fresh()
        # Moved on, as by another run.
        resumed.generator.manual_seed(1)
        resumed.load_state_dict(state)
        assert [list(resumed), list(resumed)] == expected


@pytest.mark.parametrize("kind", ["random", "its own"])
def test_workers_that_live_go_on_as_a_fresh_loader_does(kind):
    options = {"num_workers": 2, "persistent_workers": True}
    torch.manual_seed(11)
    whole = built(torch.utils.data.DataLoader, kind, True, **options)
    epochs = [list(whole) for _ in range(2)]
    after = torch.get_rng_state()
    live = built(ringloader.StatefulDataLoader, kind, True, **options)
    beginning = live.state_dict()
    list(live)
    for loader in (live, built(ringloader.StatefulDataLoader, kind, True, **options)):
        loader.load_state_dict(beginning)
        torch.manual_seed(11)
        assert [list(loader), list(loader)] == epochs
        assert torch.equal(torch.get_rng_state(), after)


def test_an_epoch_that_was_given_up_keeps_its_state():
    loader = built(ringloader.StatefulDataLoader, "random", False)
    batch = next(iter(loader))
    gc.collect()
    state = loader.state_dict()
    assert (state["_num_yielded"], state["_iterator_finished"]) == (1, False)
    resumed = built(ringloader.StatefulDataLoader, "random", False)
    resumed.load_state_dict(state)
    assert sorted(flat([batch, *resumed])) == list(range(N))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_a_batch_that_raised_was_not_got(options):
    loader = built(ringloader.StatefulDataLoader, "sequential", False, Numbers(bad=5), **options)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    raised = loader.state_dict()
    assert next(iterator) == [8, 9, 10, 11]
    assert (raised["samples"], loader.state_dict()["samples"]) == (4, 12)
    resumed = built(ringloader.StatefulDataLoader, "sequential", False)
    resumed.load_state_dict(raised)
    assert next(iter(resumed)) == [4, 5, 6, 7]


def test_rollover():
    def fresh():
        return built(ringloader.StatefulDataLoader, "random", True, last_batch="rollover")

    whole = fresh()
    epochs = [list(whole) for _ in range(3)]
    loader = fresh()
    assert list(loader) == epochs[0]
    iterator = iter(loader)
    assert next(iterator) == epochs[1][0]
    state = through_json(loader.state_dict())
    list(iterator)
    over = loader.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == [epochs[1][1:], epochs[2]]
    resumed.load_state_dict(over)
    assert list(resumed) == epochs[2]


def test_an_edited_position():
    loader = built(ringloader.StatefulDataLoader, "sequential", False)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    state["_num_yielded"] -= 1
    resumed = built(ringloader.StatefulDataLoader, "sequential", False)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == [4, 5, 6, 7]
    state["_iterator_finished"] = True
    resumed.load_state_dict(state)
    assert len(list(resumed)) == len(resumed)


@pytest.mark.parametrize("has_generator", [False, True], ids=["global", "generator"])
def test_a_position_edited_before_the_first_batch(has_generator):
    for kind in SAMPLERS:
        torch.manual_seed(11)
        whole = [*built(torch.utils.data.DataLoader, kind, has_generator)]
        after = torch.get_rng_state()
        torch.manual_seed(11)
        loader = built(ringloader.StatefulDataLoader, kind, has_generator)
        iter(loader)
        state, drawn = loader.state_dict(), torch.get_rng_state()
        for passed in (1, 2, len(whole)):
            state["_num_yielded"] = passed
            resumed = built(ringloader.StatefulDataLoader, kind, has_generator)
            resumed.load_state_dict(state)
            torch.set_rng_state(drawn)
            assert list(resumed) == whole[passed:], kind
            assert torch.equal(torch.get_rng_state(), after)


def test_other_data_is_refused():
    loader = built(ringloader.StatefulDataLoader, "random", True)
    next(iter(loader))
    state = loader.state_dict()
    for length in (N - 1, N + 1):
        resumed = built(ringloader.StatefulDataLoader, "random", True, Numbers(length))
        resumed.load_state_dict(state)
        with pytest.raises(ValueError, match="are not those that the RandomSampler gives now"):
            next(iter(resumed))
        assert resumed.state_dict() == state
    # Fewer samples than were passed.
    for last_batch in ("keep", "rollover"):
        loader = built(ringloader.StatefulDataLoader, "sequential", False, last_batch=last_batch)
        list(itertools.islice(iter(loader), 3))
        shorter = built(
            ringloader.StatefulDataLoader, "sequential", False, Numbers(10), last_batch=last_batch
        )
        shorter.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="are not those that the SequentialSampler gives now"):
            next(iter(shorter))
    loader = built(ringloader.StatefulDataLoader, "sequential", False)
    next(iter(loader))
    longer = built(ringloader.StatefulDataLoader, "sequential", False, Numbers(N + 4))
    longer.load_state_dict(loader.state_dict())
    assert flat(longer) == list(range(4, N + 4))


def test_the_fingerprint_is_the_documented_sum():
    def hashed(place, index):
        z = (place + 1) * 0x9E3779B97F4A7C15 + index & (1 << 64) - 1
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return z ^ z >> 31

    for kind, place, step in (("weighted", 0, 1), ("distributed", 1, 3)):
        loader = built(ringloader.StatefulDataLoader, kind, True)
        got = flat(itertools.islice(iter(loader), 2))
        expected = sum(hashed(place + at * step, index) for at, index in enumerate(got)) % (1 << 64)
        assert loader.state_dict()["fingerprint"] == expected


def test_bad_input_changes_nothing():
    loader = built(ringloader.StatefulDataLoader, "random", True)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(TypeError, match="needs the dict"):
        loader.load_state_dict([state])
    loader.load_state_dict({})
    for change, message in (
        ({"version": 2}, "version=2"),
        ({"samples": -1}, "samples=-1: it must be an int"),
        ({"samples": 1 << 70}, "samples=.*below"),
        ({"overtaken": [9, 8]}, "overtaken=.*pairs of numbers"),
        ({"overtaken": [-3, 8]}, "overtaken=.*pairs of numbers"),
        ({"_iterator_finished": 1}, "_iterator_finished=1"),
        ({"loader_generator": "AAAA"}, "loader_generator='AAAA'"),
        ({"loader_generator": None}, "no argument generator"),
        ({"sampler": "SequentialSampler"}, "that of SequentialSampler, and this loader has RandomSampler"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict({**state, **change})
    for key in state:
        with pytest.raises(ValueError, match=f"key '{key}'"):
            loader.load_state_dict({name: value for name, value in state.items() if name != key})
    with pytest.raises(ValueError, match="StatefulDataLoader"):
        loader.load_state_dict({"_snapshot": {}, "_iterator_finished": False})
    assert loader.state_dict() == state
    loader.load_state_dict({**state, "unknown": 1})


def test_the_dict_is_small_and_plain(tmp_path):
    for kind, has in itertools.product(SAMPLERS, (False, True)):
        loader = built(ringloader.StatefulDataLoader, kind, has)
        next(iter(loader))
        state = loader.state_dict()
        states = sum(len(value) > 100 for value in state.values() if isinstance(value, str))
        assert len(json.dumps(state)) <= 2048 + 7168 * states
        torch.save(state, tmp_path / "state")
        assert torch.load(tmp_path / "state", weights_only=True) == state
        assert pickle.loads(pickle.dumps(state)) == state


def test_the_epoch_of_a_distributed_sampler_is_set():
    loader = built(ringloader.StatefulDataLoader, "distributed", False)
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.set_epoch(5)
    assert loader.state_dict() == state
    resumed = built(ringloader.StatefulDataLoader, "distributed", False)
    resumed.load_state_dict(state)
    assert resumed.sampler.epoch == 4
    resumed.set_epoch(9)
    assert list(resumed) == list(iterator)


def test_copies_and_pickles_have_the_loaded_state():
    loader = built(ringloader.StatefulDataLoader, "random", True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loaded = built(ringloader.StatefulDataLoader, "random", True)
    loaded.load_state_dict(state)
    copies = [copy.copy(loaded), copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))]
    rest = list(iterator)
    for loader in (loaded, *copies):
        assert loader.state_dict() == state
        assert list(loader) == rest
        assert loader.state_dict()["_iterator_finished"]


def test_workers_that_live_save_an_epoch_that_a_state_began():
    options = {"num_workers": 2, "persistent_workers": True}
    loader = built(ringloader.StatefulDataLoader, "random", True, **options)
    beginning = loader.state_dict()
    list(loader)
    loader.load_state_dict(beginning)
    iterator = iter(loader)
    next(iterator)
    resumed = built(ringloader.StatefulDataLoader, "random", True)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_call_that_is_refused_changes_nothing(workers):
    loader = built(ringloader.StatefulDataLoader, "random", True, num_workers=workers)
    iterator = iter(loader)
    iterator.limit(2)
    assert len(list(iterator)) == 2
    assert next(iterator, None) is None
    paused = loader.state_dict()
    assert paused["_num_yielded"] == 2
    iterator.limit(None)
    iterator.resume()
    next(iterator)
    loader.shutdown()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was ended"):
            next(iterator)
    assert loader.state_dict()["_num_yielded"] == 3


def test_other_loaders_are_not_asked():
    with ringloader.installed():
        iterator = iter(torch.utils.data.DataLoader(Numbers()))
    assert iterator._plan.tracked is None
