"""Datasets that are arrays: random types, shapes and strides come as row by row."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate

from parity.arrays import DTYPES, ROWS, count_gathered
from ringloader import ArrayDataset, DataLoader


@pytest.fixture
def made(monkeypatch):
    return count_gathered(monkeypatch)


TENSORS = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.complex64,
    torch.int8,
    torch.uint16,
    torch.bool,
]


def random_view(rng, array):
    """Some rows of it, some of what is in them, in any order of dimensions and steps, or repeated."""
    for dim in range(1, array.ndim):
        if rng.random() < 0.3:
            step = int(rng.choice([1, 2, -1] if isinstance(array, np.ndarray) else [1, 2]))
            array = array[(slice(None),) * dim + (slice(None, None, step),)]
    if array.ndim > 2 and rng.random() < 0.3:
        array = array.swapaxes(1, int(rng.integers(1, array.ndim)))
    if rng.random() < 0.3:
        array = array[::2] if rng.random() < 0.5 or not isinstance(array, np.ndarray) else array[::-2]
    else:
        array = array[:ROWS]
    if rng.random() < 0.2:
        # Rows that all lie in one place.
        whole = (ROWS, *array.shape[1:])
        array = (
            np.broadcast_to(array[:1], whole) if isinstance(array, np.ndarray) else array[:1].expand(whole)
        )
    return array


def random_column(rng, folder, number):
    shape = (2 * ROWS, *(int(size) for size in rng.choice([0, 1, 1, 2, 3, 5], rng.integers(0, 4))))
    dtype = np.dtype(str(rng.choice(list(DTYPES))))
    count = int(np.prod(shape))
    raw = rng.integers(0, 2, count).astype(bool) if dtype.kind == "b" else rng.bytes(dtype.itemsize * count)
    # Not aligned, at times.
    offset = 0 if rng.random() < 0.8 else 1
    held = np.frombuffer(bytearray(offset) + bytearray(bytes(raw)), dtype, count, offset).reshape(shape)
    sort = rng.choice(["array", "map", "tensor", "tensor", "another tensor"])
    if sort == "map" and count:
        path = folder / f"{number}.bin"
        path.write_bytes(held.tobytes())
        held = np.memmap(path, dtype, str(rng.choice(["r+", "c"])), shape=shape)
    elif sort == "tensor" and offset == 0:
        with contextlib.suppress(TypeError):
            held = torch.from_numpy(held)
    elif sort == "another tensor":
        held = torch.from_numpy(rng.integers(0, 99, shape)).to(TENSORS[int(rng.integers(len(TENSORS)))])
    return random_view(rng, held)


def row_by_row(column, index):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return default_collate([column[row] for row in index])
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None


def same_bytes(ours, theirs):
    layout = [(one.dtype, one.shape, one.stride(), one.is_contiguous()) for one in (ours, theirs)]
    # Compared as bytes: numbers that are none are equal to themselves then.
    raw = [one.reshape(-1).view(torch.uint8) if one.numel() else None for one in (ours, theirs)]
    return layout[0] == layout[1] and (raw[0] is None or torch.equal(*raw))


@pytest.mark.rings_only
@pytest.mark.parametrize("workers", [0, 2])
def test_random_columns_come_as_row_by_row(workers, made, tmp_path):
    """Types, shapes, strides, maps and tensors at random, many beside each other in one dataset."""
    rng = np.random.default_rng(workers)
    compared = 0
    for number in range(6):
        order = [[int(row) for row in rng.integers(-ROWS, ROWS, rng.integers(1, 9))] for _ in range(4)]
        order[0] = list(range(1, ROWS))
        columns = [random_column(rng, tmp_path, f"{number} {column}") for column in range(40)]
        expected = [[row_by_row(column, index) for index in order] for column in columns]
        # Columns that torch refuses are in another test.
        there = [at for at, batches in enumerate(expected) if all(one is not None for one in batches)]
        assert len(there) > 20
        dataset = ArrayDataset(*(columns[at] for at in there))
        kept = list(DataLoader(dataset, batch_sampler=order, num_workers=workers))
        for time, batch in enumerate(kept):
            for at, ours in zip(there, batch, strict=True):
                theirs = expected[at][time]
                told = (number, at, order[time], type(columns[at]), columns[at].dtype, columns[at].shape)
                assert same_bytes(ours, theirs), told
                compared += 1
        # Their memory is theirs alone.
        for batch in kept:
            for ours in batch:
                ours.zero_()
        assert all(same_bytes(row_by_row(columns[at], order[0]), expected[at][0]) for at in there), (
            "a batch is the array's memory"
        )
    # The first of each worker is torch's where rows may not be written to.
    assert compared > 500 and made[0] >= 24 - 6 * max(1, workers) and sum(made) == 24
