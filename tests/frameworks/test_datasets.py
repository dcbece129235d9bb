"""Hugging Face datasets: map-style and iterable, in torch's format."""

import itertools
import json

import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node

import ringloader
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
@pytest.mark.limit(240)
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


@pytest.fixture
def _no_pauses(monkeypatch):
    """datasets sleeps for 5 s when threads that read Parquet files end."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


# Streams of four files, which begin each epoch from a state that was loaded.
FILES, PER_FILE = 4, 5


def files(folder, kind):
    for file in range(FILES):
        numbers = [100 * file + index for index in range(PER_FILE)]
        if kind == "parquet":
            Dataset.from_dict({"number": numbers}).to_parquet(folder / f"{file}.parquet")
        else:
            lines = "\n".join(json.dumps({"number": number}) for number in numbers)
            (folder / f"{file}.json").write_text(lines)
    found = sorted(map(str, folder.glob("*.parquet" if kind == "parquet" else "*.json")))
    return lambda: load_dataset(kind, data_files=found, split="train", streaming=True)


def plus_one(row):
    return {"number": row["number"] + 1}


def all_plus_one(rows):
    return {"number": [number + 1 for number in rows["number"]]}


def is_even(row):
    return row["number"] % 2 == 0


STREAMS = {
    "parquet": lambda read: read(),
    "json": lambda read: read(),
    "mapped": lambda read: read().map(plus_one),
    "mapped in batches": lambda read: read().map(all_plus_one, batched=True, batch_size=3),
    "filtered": lambda read: read().filter(is_even),
    "batched": lambda read: read().batch(2),
    "formatted": lambda read: read().with_format("torch"),
    "interleaved": lambda read: interleave_datasets([read(), read().map(plus_one)]),
    "mixed": lambda read: interleave_datasets([read(), read()], probabilities=[0.3, 0.7], seed=3),
    "concatenated": lambda read: concatenate_datasets([read(), read()]),
    "a node's files": lambda read: split_dataset_by_node(read(), rank=1, world_size=2),
    "a node's samples": lambda read: split_dataset_by_node(read(), rank=1, world_size=3),
    "taken": lambda read: read().take(13),
}
STATE_WAYS = {
    "none": {},
    "one": {"num_workers": 1, "persistent_workers": True},
    "two": {"num_workers": 2, "persistent_workers": True},
    "two, new": {"num_workers": 2},
}


def plainly(batch):
    return [int(number) for row in batch for number in np.atleast_1d(row["number"])]


def of(dataset, way):
    return ringloader.StatefulDataLoader(dataset, batch_size=2, collate_fn=plainly, **STATE_WAYS[way])


def positions(make, way, whole):
    """Yields loaders at several positions, and what comes after each in its epoch."""
    many = len(whole)
    for stop in sorted({0, 1, many // 2, many - 1, many}):
        for epochs_before in range(2):
            loader = of(make(), way)
            for _ in range(epochs_before):
                assert list(loader) == whole
            iterator = iter(loader)
            assert list(itertools.islice(iterator, stop)) == whole[:stop]
            state = loader.state_dict()
            # Threads of interleaved datasets would read on in the iterator that is left.
            del iterator
            yield loader, state, whole[stop:]
    loader = of(make(), way)
    assert list(loader) == whole
    yield loader, loader.state_dict(), whole


@pytest.mark.limit(360)
@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("way", STATE_WAYS)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_and_its_next_epochs_are_whole(tmp_path, kind, way):
    read = files(tmp_path, "json" if kind == "json" else "parquet")

    def make():
        return STREAMS[kind](read)

    whole = list(of(make(), way))
    assert len(whole) >= 4
    for loader, state, rest in positions(make, way, whole):
        # A program that has looked at a row before.
        looked_at = make()
        next(iter(looked_at))
        for resumed in (of(make(), way), of(looked_at, way), loader):
            resumed.load_state_dict(state)
            assert [list(resumed) for _ in range(3)] == [rest, whole, whole]


@pytest.mark.limit(240)
@pytest.mark.parametrize("way", ["none", "one"])
@pytest.mark.usefixtures("_no_pauses")
def test_a_shuffled_stream_goes_on_as_datasets_says(tmp_path, way):
    """Samples in the buffer are lost for the rest of the epoch. The next epochs are whole."""
    read = files(tmp_path, "parquet")

    def make():
        return read().shuffle(seed=1, buffer_size=8)

    whole = list(of(make(), way))
    for loader, state, rest in positions(make, way, whole):
        in_new = of(make(), way)
        for resumed in (in_new, loader):
            resumed.load_state_dict(state)
            found = [list(resumed) for _ in range(3)]
            assert found[1:] == [whole, whole]
            assert len(found[0]) <= len(rest)


@pytest.mark.limit(240)
@pytest.mark.parametrize("way", STATE_WAYS)
@pytest.mark.parametrize("calls", ["loader", "dataset", "no one"])
@pytest.mark.usefixtures("_no_pauses")
def test_set_epoch_of_a_resumed_stream(tmp_path, way, calls):
    """The order of the files is drawn from the epoch, and a state of another epoch is of no use."""
    read = files(tmp_path, "parquet")

    def run(state=None, first=0, stop=None):
        dataset = read()
        loader = of(dataset, way)
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for epoch in range(first, 4):
            if calls == "loader":
                loader.set_epoch(epoch)
            elif calls == "dataset":
                dataset.set_epoch(epoch)
            found.append([])
            for batch in loader:
                found[-1].append(batch)
                if (epoch, len(found[-1])) == stop:
                    return found, loader.state_dict()
        return found, None

    whole, _ = run()
    assert (whole[1] == whole[2]) == (calls == "no one")
    many = len(whole[1])
    for stop in (1, 4, many):
        _, state = run(stop=(1, stop))
        found, _ = run(state, first=1)
        assert found == [whole[1][stop:], *whole[2:]]


@pytest.mark.usefixtures("_no_pauses")
def test_shuffled_files_and_several_workers_are_an_error_of_datasets(tmp_path):
    """It loads the state of a worker's files into all files. torchdata's loader raises the same."""
    torchdatas = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    read = files(tmp_path, "parquet")
    for cls in (torchdatas, ringloader.StatefulDataLoader):

        def made(cls=cls):
            dataset = read().shuffle(seed=1, buffer_size=8)
            return cls(dataset, batch_size=2, collate_fn=plainly, num_workers=2)

        loader = made()
        iterator = iter(loader)
        next(iterator)
        resumed = made()
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(IndexError, match="list index out of range"):
            list(resumed)
        del iterator


@pytest.mark.usefixtures("_no_pauses")
def test_a_loader_for_each_epoch(tmp_path):
    """Without workers they have the same dataset, which keeps the state."""
    dataset = files(tmp_path, "parquet")()
    whole = list(of(dataset, "none"))
    loader = of(dataset, "none")
    list(itertools.islice(loader, 3))
    resumed = of(dataset, "none")
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == whole[3:]
    for _ in range(2):
        assert list(of(dataset, "none")) == whole
