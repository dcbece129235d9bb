"""``state_dict`` where torch's own loader runs, which reads the sampler through ours, and of DataPipes."""

import itertools
import json
import warnings

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.distributed import DistributedSampler

import ringloader

N = 23


class Numbers(torch.utils.data.Dataset):
    def __init__(self, bad=None):
        self.bad = bad
        self.reads = []

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.reads.append(index)
        if index == self.bad:
            raise ValueError("a bad sample")
        return index


class Stream(torch.utils.data.IterableDataset):
    """Shuffles each worker's part by its seed."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        seed = 0 if info is None else info.seed
        assert info is None or torch.initial_seed() == seed
        for number in torch.randperm(N, generator=torch.Generator().manual_seed(seed % 1000)).tolist():
            yield number * workers + worker


class Backwards(torch.utils.data.Sampler):
    """A sampler that only Python iterates."""

    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self):
        return N


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "sequential": dict,
    "random": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": seeded()},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(), 3, 1)},
    "python's": lambda: {"sampler": Backwards()},
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(Numbers(), generator=seeded(3)), 4, True)
    },
    "one by one": lambda: {"batch_size": None, "sampler": DistributedSampler(Numbers(), 3, 1)},
}


def built(cls, kind, data=None, **options):
    given = SAMPLERS[kind]()
    if not {"batch_sampler", "batch_size"} & set(given):
        given["batch_size"] = 4
    collate = {} if "batch_size" in given and given["batch_size"] is None else {"collate_fn": list}
    return cls(Numbers() if data is None else data, **collate, **given, **options)


def plain(batches):
    return [batch if isinstance(batch, list) else int(batch) for batch in batches]


def off(monkeypatch, is_off=True):
    monkeypatch.setenv("RINGLOADER", "off" if is_off else "on")


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["none", "workers"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_rest_and_later_epochs_are_torchs(kind, options, monkeypatch):
    torch.manual_seed(11)
    whole = built(torch.utils.data.DataLoader, kind, **options)
    epochs = [plain(whole) for _ in range(3)]
    after = torch.get_rng_state()
    # By which path the run is stopped, and by which it goes on.
    for stop, stopped_off, resumed_off in (
        (2, True, True),
        (1, True, False),
        (1, False, True),
        (0, True, True),
    ):
        off(monkeypatch, stopped_off)
        torch.manual_seed(11)
        loader = built(ringloader.StatefulDataLoader, kind, **options)
        assert plain(loader) == epochs[0]
        iterator = iter(loader)
        got = plain(itertools.islice(iterator, stop))
        before, state = torch.get_rng_state(), json.loads(json.dumps(loader.state_dict()))
        assert state["_num_yielded"] == stop
        del iterator

        off(monkeypatch, resumed_off)
        torch.manual_seed(99)
        data = Numbers()
        resumed = built(ringloader.StatefulDataLoader, kind, data, **options)
        resumed.load_state_dict(state)
        torch.set_rng_state(before)
        rest = plain(resumed)
        assert got + rest == epochs[1]
        assert plain(resumed) == epochs[2]
        assert torch.equal(torch.get_rng_state(), after)
        if not options:
            assert len(data.reads) < 2 * N or stop == 0
        assert resumed.fingerprint() is not None


def test_persistent_workers(monkeypatch):
    off(monkeypatch)
    options = {"num_workers": 2, "persistent_workers": True}
    whole = built(torch.utils.data.DataLoader, "generator", **options)
    epochs = [list(whole) for _ in range(3)]
    loader = built(ringloader.StatefulDataLoader, "generator", **options)
    assert list(loader) == epochs[0]
    iterator = iter(loader)
    got = list(itertools.islice(iterator, 2))
    state = loader.state_dict()
    workers = iterator._workers
    for resumed in (loader, built(ringloader.StatefulDataLoader, "generator", **options)):
        resumed.load_state_dict(state)
        assert got + list(resumed) == epochs[1]
        assert list(resumed) == epochs[2]
    assert loader._iterator._workers is workers


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["none", "workers"])
def test_a_batch_that_raised(options, monkeypatch):
    off(monkeypatch)
    loader = built(ringloader.StatefulDataLoader, "sequential", Numbers(bad=5), **options)
    iterator = iter(loader)
    assert next(iterator) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    assert loader.state_dict()["_num_yielded"] == 1
    assert next(iterator)[0] == 8
    assert loader.state_dict()["_num_yielded"] == 3
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader))[0] == 12


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["none", "workers"])
def test_other_indices_are_refused(options, monkeypatch):
    off(monkeypatch)
    loader = built(ringloader.StatefulDataLoader, "distributed", **options)
    next(iter(loader))
    state = loader.state_dict()
    other = built(ringloader.StatefulDataLoader, "distributed", **options)
    other.sampler.seed = 5
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="are not those that the DistributedSampler gives now"):
        next(iter(other))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["none", "workers"])
def test_a_stream_has_no_state(options, monkeypatch):
    loader = ringloader.StatefulDataLoader(Stream(), batch_size=4, **options)
    next(iter(loader))
    state = loader.state_dict()
    off(monkeypatch)
    loader = ringloader.StatefulDataLoader(Stream(), batch_size=4, **options)
    next(iter(loader))
    assert loader.state_dict() == {}
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no position of an IterableDataset can be had there"):
        iter(loader)


def test_where_torchs_loader_has_no_state(monkeypatch, caplog):
    off(monkeypatch)
    loader = ringloader.StatefulDataLoader(Numbers(), num_workers=2, in_order=False)
    state = loader.state_dict()
    next(iter(loader))
    assert loader.state_dict() == {}
    assert loader.fingerprint() is None
    assert "state_dict() returns {}" in caplog.text
    assert "with in_order=False" in caplog.text
    # With what accelerate adds to any state.
    for empty in ({}, {"_iterator_finished": True}):
        loader.load_state_dict(empty)
        assert len(list(loader)) == N
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="where torch's own loader runs: RINGLOADER=off"):
        iter(loader)


def test_a_replaced_part(monkeypatch):
    own = _SingleProcessDataLoaderIter._next_data
    monkeypatch.setattr(_SingleProcessDataLoaderIter, "_next_data", lambda iterator: own(iterator))
    loader = built(ringloader.StatefulDataLoader, "random")
    iterator = iter(loader)
    got = list(itertools.islice(iterator, 2))
    assert ringloader.report(iterator).path == "torch"
    loader.load_state_dict(loader.state_dict())
    assert sorted(itertools.chain(*got, *loader)) == list(range(N))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
def test_map_style_pipes(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = SequenceWrapper(range(N))

    def loader_of():
        return ringloader.StatefulDataLoader(pipe, batch_size=4, collate_fn=list, shuffle=True, **options)

    loader = loader_of()
    iterator = iter(loader)
    got = list(itertools.islice(iterator, 2))
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert sorted(itertools.chain(*got, *rest)) == list(range(N))
    if options.get("in_order", True):
        assert rest == list(iterator)


def test_the_sampler_is_torchs_to_others(monkeypatch):
    off(monkeypatch)
    loader = ringloader.StatefulDataLoader(Numbers(), batch_size=4)
    iterator = iter(loader)
    assert isinstance(loader.sampler, SequentialSampler)
    assert type(loader.batch_sampler) is BatchSampler
    assert len(iterator) == len(loader) == 6
