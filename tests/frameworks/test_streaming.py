"""mosaicml-streaming: loaders of its own class over shards, and their state."""

import numpy as np
import pytest
import streaming
import torch

from frameworks import training
from parity.describe import describe

LENGTH = 40
COLUMNS = {"features": f"ndarray:float32:{training.FEATURES}", "class": "int", "text": "str"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("shards") / "made")
    with streaming.MDSWriter(out=folder, columns=COLUMNS, size_limit=600) as writer:
        for index in range(LENGTH):
            features = np.arange(training.FEATURES, dtype=np.float32) * (index % 7) / 7
            writer.write({"features": features, "class": index % training.CLASSES, "text": "a" * (index % 4)})
    return folder


def loader_of(way, shards, workers, **options):
    dataset = streaming.StreamingDataset(local=shards, shuffle=True, shuffle_seed=3, batch_size=4)
    return way.loader(streaming.StreamingDataLoader, dataset, batch_size=4, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_training(compare, shards, workers):
    def program(way):
        loader = loader_of(way, shards, workers)
        model = training.small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = [
            training.step(model, optimizer, (batch["features"], batch["class"]))
            for _ in range(3)
            for batch in loader
        ]
        return [losses, training.weights(model), loader.num_samples_yielded]

    ours = compare(program, workers=workers)
    assert len(ours.made) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_within_an_epoch(compare, shards, workers):
    def program(way):
        loader = loader_of(way, shards, workers)
        iterator = iter(loader)
        first = [describe(next(iterator)) for _ in range(3)]
        state = loader.state_dict()
        rest = [describe(batch) for batch in iterator]
        del iterator, loader
        resumed = loader_of(way, shards, workers)
        resumed.load_state_dict(state)
        assert [describe(batch) for batch in resumed] == rest
        return [first, rest, str(state), [describe(batch) for batch in resumed]]

    ours = compare(program, workers=workers)
    assert len(ours.made) == 3


def test_persistent_workers(compare, shards):
    def program(way):
        loader = loader_of(way, shards, 2, persistent_workers=True)
        return [describe(batch) for _ in range(2) for batch in loader]

    ours = compare(program)
    assert len(ours.made) == 1


def test_a_loader_of_torchs_class(compare, shards):
    def program(way):
        dataset = streaming.StreamingDataset(local=shards, shuffle=True, batch_size=4)
        loader = way.DataLoader(dataset, batch_size=4, num_workers=2)
        return [describe(batch) for _ in range(2) for batch in loader]

    compare(program)
