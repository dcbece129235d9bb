"""The recipe for windows of tokens: equal to windows cut one by one, and to nanoGPT's batches."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset

from ringloader import ArrayDataset, DataLoader
from ringloader._features import arrays

BLOCK, BATCH = 16, 6
# Rows that may not be written to are said once in a process.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.as_tensor(np.broadcast_to(np.float32(1), 3))


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_000, 500, dtype=np.uint16).tofile(path)
    return np.memmap(path, np.uint16, "r")


def windows(tokens):
    return ArrayDataset(sliding_window_view(tokens, BLOCK + 1, subok=True))


class Cut(Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens) - BLOCK

    def __getitem__(self, index):
        return torch.from_numpy(self.tokens[index : index + BLOCK + 1].astype(np.int64))


def equal(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 3
    assert all(one.dtype == torch.uint16 for one in ours)
    return all(torch.equal(one.long(), other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_of_tokens_are_those_cut_one_by_one(tokens, workers):
    torch.manual_seed(3)
    theirs = list(torch.utils.data.DataLoader(Cut(tokens), BATCH, shuffle=True))
    torch.manual_seed(3)
    loader = DataLoader(windows(tokens), BATCH, shuffle=True, num_workers=workers)
    assert equal(loader, theirs)


def get_batch(data, indices):
    """As nanoGPT's: inputs and targets, cut window by window."""
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in indices])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in indices])
    return x, y


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_with_nanogpts_draws_are_its_batches(tokens, workers):
    draws = [torch.randint(len(tokens) - BLOCK, (BATCH,)).tolist() for _ in range(8)]
    draws[0][0] = len(tokens) - BLOCK - 1
    loader = DataLoader(windows(tokens), batch_sampler=draws, num_workers=workers)
    count = 0
    for window, indices in zip(loader, draws, strict=True):
        x, y = get_batch(tokens, indices)
        assert torch.equal(window[:, :-1].long(), x) and torch.equal(window[:, 1:].long(), y)
        count += 1
    assert count == len(draws)


def test_windows_are_gathered_and_pickled_by_the_name_of_their_file(tokens, monkeypatch):
    dataset = windows(tokens)
    assert len(pickle.dumps(dataset)) < 1000 < dataset.arrays[0].nbytes
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).arrays[0], dataset.arrays[0])

    found = []
    batch = arrays.Rows.batch

    def noted(rows, index):
        found.append(batch(rows, index))
        return found[-1]

    monkeypatch.setattr(arrays.Rows, "batch", noted)
    batches = list(DataLoader(dataset, BATCH))
    # The first is torch's: it may warn of rows that may not be written to.
    assert [one is None for one in found] == [True] + [False] * (len(batches) - 1)
