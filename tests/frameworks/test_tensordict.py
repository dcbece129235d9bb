"""tensordict: batches that are TensorDicts and tensorclasses; torch's `default_collate` is taught them."""

import functools

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    TensorDict,
    collate,
    is_tensor_collection,
    tensorclass,
)

from frameworks import loader_ways
from parity.describe import describe

ROWS = 18


@tensorclass
class Picture:
    pixels: torch.Tensor
    label: torch.Tensor
    name: str


def row(index):
    noise = torch.rand(3)
    return TensorDict({"noise": noise, "inner": {"number": torch.arange(4) + index}})


def picture(index):
    pixels = torch.full((3, 4, 4), index, dtype=torch.uint8)
    return Picture(pixels, torch.tensor(index), f"picture {index}")


def ragged(index):
    return TensorDict({"points": torch.full((1 + index % 3, 2), float(index)), "score": torch.tensor(1.0)})


def with_label(index):
    return row(index), {"label": index, "weights": [0.5, True]}


class Made(torch.utils.data.Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.make(index)


class Read(torch.utils.data.Dataset):
    """A table that is read a batch at a time."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitems__(self, indices):
        return self.table[torch.tensor(indices)]


def table():
    return TensorDict(
        {"x": torch.arange(3.0 * ROWS).reshape(ROWS, 3), "inner": {"y": torch.arange(ROWS)}},
        batch_size=[ROWS],
    )


def content(batch):
    if isinstance(batch, (list, tuple)):
        return [type(batch).__name__, *map(content, batch)]
    if isinstance(batch, LazyStackedTensorDict):
        return ["lazy", *map(content, batch.tensordicts)]
    if not is_tensor_collection(batch):
        return describe(batch)
    head = [type(batch).__name__, *batch.batch_size, batch.is_locked, batch.is_memmap()]
    return [*head, *((key, content(value)) for key, value in sorted(batch.items()))]


def program_of(dataset, **options):
    def program(way):
        loader = way.DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "num_workers": 2, **options})
        return [content(batch) for _ in range(2) for batch in loader]

    return program


@pytest.mark.parametrize("make", [row, picture, ragged, with_label])
def test_torchs_collation_knows_them(compare, make):
    compare(program_of(Made(make)))


@pytest.mark.parametrize("options", [{}, {"pad_keys": {"points": 0.0}, "mask_key": "mask"}])
def test_its_own_collation(compare, options):
    compare(program_of(Made(ragged), collate_fn=functools.partial(collate, **options)))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_table_that_is_read_by_batches(compare, mapped, tmp_path):
    compare(program_of(Read(table().memmap(tmp_path) if mapped else table()), persistent_workers=True))


def test_rows_of_a_mapped_table_arrive_as_their_place_in_the_file(compare, tmp_path):
    """Rows are pickled by their file's name: nothing is copied, and later writes to the file are seen."""

    def program(way):
        mapped = table().memmap(tmp_path / way.name)
        slices = [slice(0, 5), slice(5, ROWS)]
        loader = way.DataLoader(mapped, None, sampler=slices, num_workers=2, collate_fn=collate)
        batches = list(loader)
        assert all(isinstance(batch["x"], MemoryMappedTensor) for batch in batches)
        before = [batch["x"].tolist() for batch in batches]
        mapped["x"][0] += 1
        after = [batch["x"].tolist() for batch in batches]
        assert after[0] != before[0]
        return [before, after]

    ours = compare(program)
    assert all(made.counters()["copied"] == 0 for made in ours.made)


def test_other_samples_are_collated_natively(way_name):
    """tensordict's additions to torch's map take nothing from them: both columns are made in the slot."""

    def samples(index):
        return {"pixels": torch.full((3, 8, 8), index), "label": index}

    with loader_ways.use(way_name) as way:
        loader = way.DataLoader(Made(samples), batch_size=ROWS, num_workers=1)
        (batch,) = loader
    assert batch["label"].tolist() == list(range(ROWS))
    (made,) = way.made
    assert made.counters()["in_place"] == 2
