"""Arrays for datasets, and the count of the gathers that make their batches."""

from __future__ import annotations

import multiprocessing
import warnings

import numpy as np
import torch
import torch.utils.data

from parity.harness import Case
from ringloader._features import arrays

ROWS = 7
RANDOM = np.random.default_rng(0)
# Rows that may not be written to are said once in a process: here, for both loaders.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.as_tensor(np.broadcast_to(np.float32(1), 3))
DTYPES = "?bBhHiIlqefdFD"


def noise(dtype, *shape):
    """Any bytes: numbers that are none, and those no conversion keeps."""
    dtype = np.dtype(dtype)
    count = int(np.prod((ROWS, *shape)))
    made = (
        RANDOM.integers(0, 2, count).astype(bool)
        if dtype.kind == "b"
        else RANDOM.bytes(dtype.itemsize * count)
    )
    return np.frombuffer(made, dtype).reshape(ROWS, *shape).copy()


def floats(*shape):
    return torch.arange(float(np.prod((ROWS, *shape)))).reshape(ROWS, *shape)


def count_gathered(monkeypatch):
    """Counts the batches that a gather has made, and those left to torch, in forked processes too."""
    counts = multiprocessing.Array("i", 2)
    batch = arrays.Rows.batch

    def counted(self, index):
        found = batch(self, index)
        with counts.get_lock():
            counts[0 if found is not None else 1] += 1
        return found

    monkeypatch.setattr(arrays.Rows, "batch", counted)
    return counts


def case(dataset, workers, **arguments):
    arguments = {"batch_size": 3, "num_workers": workers, **arguments}
    # Starting workers is most of the time that a case takes.
    epochs = 1 if workers else 2
    return Case(
        lambda: {"dataset": dataset, "generator": torch.Generator().manual_seed(5), **arguments},
        epochs=epochs,
    )
