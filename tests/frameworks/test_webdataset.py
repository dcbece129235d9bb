"""webdataset: pipelines over shards, in workers and behind them."""

import random

import numpy as np
import pytest
import webdataset as wds

import ringloader
from frameworks import loader_ways
from parity.describe import describe

SHARDS = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with wds.ShardWriter(f"{folder}/%03d.tar", maxcount=10, verbose=0) as writer:
        for index in range(SHARDS * 10):
            writer.write(
                {
                    "__key__": f"sample{index:03}",
                    "png": np.random.default_rng(index).integers(255, size=(8, 6, 3), dtype=np.uint8),
                    "cls": index % 3,
                    "json": {"index": index, "words": ["word"] * (index % 4)},
                    "npy": np.arange(index % 5 + 1),
                }
            )
    return f"{folder}/{{000..{SHARDS - 1:03}}}.tar"


def noisy(picture):
    """From a generator that a worker seeds."""
    return picture + random.random()


def pictures(shards):
    """Shuffled and in batches. Without its own seeds webdataset would shuffle by the time of day."""
    return (
        wds.WebDataset(shards, shardshuffle=SHARDS, seed=5)
        .shuffle(12, initial=6, seed=7)
        .decode("torchrgb")
        .to_tuple("png", "cls", "json", "__key__")
        .map_tuple(noisy, int, dict, str)
        .batched(4)
    )


def loader_of(way, *args, **options):
    """A `WebLoader`, which builds torch's class by itself."""
    loader = wds.WebLoader(*args, batch_size=None, num_workers=2, **options)
    if way.name == "class":
        ringloader.convert(loader.stage(0))
    return loader


def epochs(loader, count=2):
    return [[describe(batch) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
def test_web_loader(compare, shards, persistent):
    def program(way):
        return epochs(loader_of(way, pictures(shards), persistent_workers=persistent))

    ours = compare(program)
    assert len(ours.made) == (1 if persistent else 2)


def test_batches_mixed_over_workers(compare, shards):
    """webdataset's epoch ends where the loader's does not: the iterator is dropped half-way."""

    def program(way):
        loader = loader_of(way, pictures(shards))
        return epochs(loader.unbatched().shuffle(20, seed=3).batched(5).with_epoch(6))

    compare(program)


def test_a_plain_loader(compare, shards):
    """Samples whose sizes differ, as they come from the shards, with a collation of the user's."""

    def program(way):
        dataset = wds.WebDataset(shards, shardshuffle=False).decode()
        return epochs(way.DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list))

    compare(program)


def test_a_pipeline_of_single_stages(compare, shards):
    def program(way):
        dataset = wds.DataPipeline(
            wds.SimpleShardList(shards, seed=2),
            wds.detshuffle(SHARDS, seed=4),
            wds.split_by_worker,
            wds.tarfile_to_samples(),
            wds.detshuffle(10, initial=5, seed=6),
            wds.decode("rgb8"),
            wds.to_tuple("png", "json"),
        )
        loader = way.DataLoader(
            dataset, batch_size=3, num_workers=2, collate_fn=list, persistent_workers=True
        )
        return epochs(wds.DataPipeline(loader, wds.unbatched(), wds.batched(4, collation_fn=list)))

    compare(program)


@loader_ways.INSTALL_ONLY
def test_shards_drawn_anew(compare, shards):
    """Without an end, mixed of two, and longer than what was said: each worker gives as much."""

    def program(way):
        datasets = [
            wds.DataPipeline(
                wds.ResampledShards(shards, seed=seed, deterministic=True),
                wds.tarfile_to_samples(),
                wds.decode(),
                wds.to_tuple("npy", "cls"),
            )
            for seed in range(2)
        ]
        mixed = wds.DataPipeline(wds.RandomMix(datasets, [0.3, 0.7]))
        loader = loader_of(way, mixed.with_epoch(12).with_length(12, silent=True))
        assert len(loader.stage(0)) == 12
        return epochs(loader)

    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        compare(program)
