"""torchdata: StatefulDataLoader has iterators and a worker loop of its own. It is left alone, or replaced."""

import abc
import inspect
import itertools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchdata.stateful_dataloader
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.stateful_dataloader import StatefulDataLoader

import ringloader
from frameworks import loader_ways, training
from parity.describe import describe


def resumed(take):
    """Two batches, the state, and from a new loader what follows it."""
    loader = StatefulDataLoader(training.Points(), batch_size=4, num_workers=2, shuffle=True)
    iterator = iter(loader)
    seen = [describe(next(iterator)) for _ in range(take)]
    state = loader.state_dict()
    again = StatefulDataLoader(training.Points(), batch_size=4, num_workers=2, shuffle=True)
    again.load_state_dict(state)
    rest = [describe(batch) for batch in again]
    assert len(seen) + len(rest) == 6
    return [seen, rest]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("way_name", ["install"])
@pytest.mark.parametrize("take", [0, 2, 6])
def test_it_is_left_alone_under_install(way_name, take):
    with loader_ways.use("torch"):
        expected = resumed(take)
    with loader_ways.use(way_name) as way:
        assert resumed(take) == expected
        assert way.made == []
        # install() is in force all the same.
        assert len(list(way.DataLoader(training.Points(), batch_size=12, num_workers=1))) == 2
    assert len(way.made) == 1


def numbers(cls, **options):
    return cls(training.Numbers(), batch_size=4, collate_fn=list, **options)


def places(batches):
    return [[number for _, number in batch] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 10, "end"])
def test_ours_goes_on_as_theirs_does(workers, taken):
    """In an order that both have: theirs shuffles by a generator of its own."""
    found = []
    for cls in (StatefulDataLoader, ringloader.StatefulDataLoader):
        loader = numbers(cls, sampler=range(39, -1, -1), num_workers=workers)
        iterator = iter(loader)
        seen = list(itertools.islice(iterator, 99 if taken == "end" else taken))
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert state["_iterator_finished"] == (taken == "end")
        again = numbers(cls, sampler=range(39, -1, -1), num_workers=workers)
        again.load_state_dict(state)
        found.append([places(seen), *(places(again) for _ in range(2))])
    assert found[0] == found[1]
    assert len(found[1][2]) == 10


def test_a_state_of_theirs_is_refused():
    loader = numbers(StatefulDataLoader)
    next(iter(loader))
    with pytest.raises(ValueError, match="a state of torchdata's StatefulDataLoader"):
        numbers(ringloader.StatefulDataLoader).load_state_dict(loader.state_dict())


class Base(Stateful, abc.ABC):
    """The abstract class of torchtitan's loaders."""

    @abc.abstractmethod
    def __iter__(self): ...


def parallel_aware():
    """Returns a class by the contract of torchtitan's ParallelAwareDataloader, over torchdata's name."""
    stateful = torchdata.stateful_dataloader.StatefulDataLoader
    known = set(inspect.signature(stateful.__init__).parameters)

    class ParallelAware(stateful, Base):
        def __init__(self, dataset, dp_rank, dp_world_size, **options):
            assert set(options) <= known
            # Before the loader is one.
            self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
            self.batch_size = options["batch_size"]
            super().__init__(dataset, **options)
            self._rank_id = f"dp_rank_{dp_rank}"

        def state_dict(self):
            return {self._rank_id: pickle.dumps(super().state_dict()), "world_size": self.dp_world_size}

        def load_state_dict(self, state_dict):
            if not state_dict:
                return
            assert state_dict["world_size"] == self.dp_world_size
            super().load_state_dict(pickle.loads(state_dict[self._rank_id]))

    return ParallelAware


def of_rank(cls, rank, dataset=None, **options):
    """Returns the loader of one rank of two."""
    dataset = training.Numbers() if dataset is None else dataset
    sampler = torch.utils.data.DistributedSampler(dataset, 2, rank)
    return cls(dataset, rank, 2, batch_size=4, sampler=sampler, collate_fn=list, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchtitans_contract(tmp_path, workers):
    with ringloader.installed(stateful=True):
        cls = parallel_aware()
        assert issubclass(cls, ringloader.StatefulDataLoader)
        loaders = [of_rank(cls, rank, num_workers=workers) for rank in range(2)]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            list(itertools.islice(iterator, 3))
        for rank, loader in enumerate(loaders):
            dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / str(rank), no_dist=True)
        rests = [places(iterator) for iterator in iterators]
        for rank in range(2):
            resumed = of_rank(cls, rank, num_workers=2 - workers)
            resumed.load_state_dict({})
            dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / str(rank), no_dist=True)
            assert places(resumed) == rests[rank]
    assert all(rests) and rests[0] != rests[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_ours_is_saved_by_torch_distributed_checkpoint(tmp_path, workers):
    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        return numbers(ringloader.StatefulDataLoader, shuffle=True, generator=generator, num_workers=workers)

    saved = loader(3)
    iterator = iter(saved)
    next(iterator)
    dcp.save({"loader": saved}, checkpoint_id=tmp_path, no_dist=True)
    resumed = loader(50)
    dcp.load({"loader": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert places(resumed) == places(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchtitans_contract_over_a_stream(workers):
    """As torchtitan has it: the dataset knows its rank's place."""
    with ringloader.installed(stateful=True):
        cls = parallel_aware()

        def made():
            options = {"batch_size": 4, "num_workers": workers, "collate_fn": list}
            return cls(training.Counted(), 0, 1, snapshot_every_n_steps=1, **options)

        loader = made()
        iterator = iter(loader)
        list(itertools.islice(iterator, 3))
        state = loader.state_dict()
        rest = places(iterator)
        resumed = made()
        resumed.load_state_dict(state)
        assert places(resumed) == rest
        assert len(rest) == 7
