"""Hugging Face datasets: map-style and iterable, in torch's format."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from parity.describe import describe

ROWS = 30


def rows():
    random = np.random.default_rng(3)
    return {
        "number": list(range(ROWS)),
        "vector": random.random((ROWS, 4)).tolist(),
        "text": [f"row {index}" for index in range(ROWS)],
    }


def shard_rows(shards):
    for shard in shards:
        for index in range(5):
            yield {"shard": shard, "value": float(10 * shard + index)}


def stream(shards):
    made = IterableDataset.from_generator(shard_rows, gen_kwargs={"shards": list(range(shards))})
    assert made.num_shards == shards
    return made


def epochs(loader, count=2):
    return [[describe(batch) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"persistent_workers": True}])
def test_rows_in_torchs_format(compare, options):
    def program(way):
        table = Dataset.from_dict(rows()).with_format("torch")
        loader = way.DataLoader(table, **{"batch_size": 4, "num_workers": 2, "shuffle": True, **options})
        return epochs(loader)

    compare(program)


def test_a_table_in_a_file_with_a_transform(compare, tmp_path):
    """Memory-mapped Arrow, opened by every worker; the transform draws."""
    Dataset.from_dict(rows()).save_to_disk(tmp_path / "table")

    def with_noise(batch):
        return {**batch, "noise": np.random.rand(len(batch["number"])).tolist()}

    def program(way):
        table = Dataset.load_from_disk(tmp_path / "table").with_transform(with_noise)
        return epochs(way.DataLoader(table, batch_size=7, num_workers=2))

    compare(program)


def test_a_stream_in_torchs_format(compare):
    def program(way):
        loader = way.DataLoader(stream(4).with_format("torch"), batch_size=3, num_workers=2)
        return epochs(loader)

    compare(program)


def test_more_workers_than_shards(compare):
    """Workers without a shard have nothing to say."""

    def program(way):
        loader = way.DataLoader(stream(2).with_format("torch"), batch_size=3, num_workers=3)
        first, second = epochs(loader)
        assert first == second
        return first

    compare(program)


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_the_workers(compare, persistent):
    """The number of the epoch lies in a tensor that the workers share."""

    def program(way):
        shuffled = stream(4).shuffle(seed=1, buffer_size=8).with_format("torch")
        loader = way.DataLoader(shuffled, batch_size=4, num_workers=2, persistent_workers=persistent)
        seen = []
        for epoch in range(3):
            shuffled.set_epoch(epoch)
            seen.append([describe(batch) for batch in loader])
        assert seen[0] != seen[1] != seen[2], "the epochs are the same: set_epoch reached no worker"
        return seen

    compare(program)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_worker_that_is_not_forked_shares_the_epoch(compare):
    def program(way):
        shuffled = stream(2).shuffle(seed=1, buffer_size=8).with_format("torch")
        loader = way.DataLoader(
            shuffled,
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        seen = []
        for epoch in range(2):
            shuffled.set_epoch(epoch)
            seen.append([describe(batch) for batch in loader])
        assert seen[0] != seen[1]
        return seen

    compare(program)
