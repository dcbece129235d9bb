"""litdata: its loader makes its iterators itself, and a subclass turns to torch's method."""

import litdata
import numpy as np
import pytest
import torch.utils.data

import ringloader
from frameworks import loader_ways
from parity import harness
from parity.describe import describe

LENGTH = 40


class Loader(litdata.StreamingDataLoader):
    """The subclass of docs/frameworks/litdata.md."""

    def _get_iterator(self):
        if self.restore:
            return super()._get_iterator()
        return torch.utils.data.DataLoader._get_iterator(self)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Samples in several chunks."""
    made = tmp_path_factory.mktemp("chunks")
    cache = litdata.streaming.Cache(str(made), chunk_bytes=2000)
    for index in range(LENGTH):
        cache[index] = {"number": index, "values": np.arange(50, dtype=np.float32) + index}
    cache.done()
    cache.merge()
    return str(made)


def dataset(folder, seed=3):
    return litdata.StreamingDataset(folder, shuffle=True, seed=seed)


def epochs(loader, count=2):
    return [[describe(batch) for batch in loader] for _ in range(count)]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass(compare, folder, workers):
    def program(way):  # noqa: ARG001
        return epochs(Loader(dataset(folder), batch_size=4, num_workers=workers), 3)

    ours = compare(program, workers=workers)
    assert len(ours.made) == 3


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
def test_several_datasets(compare, folder, workers):
    """The loader reads in each batch how far each of them is."""

    def program(way):  # noqa: ARG001
        combined = litdata.CombinedStreamingDataset(
            [dataset(folder), dataset(folder, seed=8)], weights=[0.3, 0.7], seed=5, iterate_over_all=False
        )
        loader = Loader(combined, batch_size=4, num_workers=workers)
        found = epochs(loader)
        return [found, {name: str(value) for name, value in loader.state_dict().items() if name != "dataset"}]

    compare(program, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_within_an_epoch(folder, workers):
    """By litdata's own iterator, which begins with the worker whose turn it is."""

    def program():
        loader = Loader(dataset(folder), batch_size=4, num_workers=workers)
        iterator = iter(loader)
        found = [[describe(next(iterator)) for _ in range(3)]]
        state = loader.state_dict()
        found.append([describe(batch) for batch in iterator])
        resumed = Loader(dataset(folder), batch_size=4, num_workers=workers)
        resumed.load_state_dict(state)
        return found + epochs(resumed)

    with loader_ways.use("torch"):
        expected = program()
    assert expected[2] == expected[1]
    with loader_ways.use("install") as ours:
        assert program() == expected
    path = harness.expected_path if workers else "single-process"
    assert ours.paths == [path, path]


def test_the_loader_itself_is_not_reached(folder):
    loader = litdata.StreamingDataLoader(dataset(folder), batch_size=4, num_workers=2)
    with loader_ways.use("torch"):
        expected = epochs(loader, 1)
    loader = litdata.StreamingDataLoader(dataset(folder), batch_size=4, num_workers=2)
    with loader_ways.use("install") as ours:
        assert epochs(loader, 1) == expected
        found = ringloader.report(loader)
    assert found.path == "torch"
    assert found.reason.startswith("litdata.streaming.dataloader.StreamingDataLoader has a _get_iterator")
    assert [one.path for one in ours.made] == []
    with pytest.raises(TypeError, match="StreamingDataLoader has a _get_iterator that does not call torch's"):
        ringloader.convert(litdata.StreamingDataLoader(dataset(folder)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchs_class(compare, folder, workers):
    """The program tells the dataset the epoch."""
    theirs = epochs(litdata.StreamingDataLoader(dataset(folder), batch_size=4, num_workers=workers))

    def program(way):
        data = dataset(folder)
        loader = way.DataLoader(data, batch_size=4, num_workers=workers)
        found = []
        for epoch in (1, 2):
            data.set_epoch(epoch)
            found += epochs(loader, 1)
        assert found == theirs
        return found

    compare(program, workers=workers)
