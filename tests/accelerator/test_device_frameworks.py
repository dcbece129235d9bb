"""Frameworks that find batches on the device already: no second copy, and the same tensors."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from accelerator import pretend
from accelerator.moved import DEVICE, LARGE, Numbered, assert_numbered, bytes_of, loader_on, path

pytestmark = pytest.mark.rings_only

__all__ = ["path"]

SIZES = (100, LARGE)


def assert_finds_it(loader: Any, move: Any, count: int = 4) -> None:
    """That ``move`` gives back the tensors of every batch as they are."""
    number = -1
    for number, batch in enumerate(loader):
        before = {name: tensor.data_ptr() for name, tensor in batch.items()}
        copies = pretend.counters()
        moved = move(batch)
        after = pretend.counters()
        assert {name: tensor.data_ptr() for name, tensor in moved.items()} == before
        for name in ("copies_to_device", "copies_on_device", "copies_to_host"):
            assert after[name] == copies[name], f"{name} by the framework"
        assert_numbered(dict(moved.items()), number)
    assert number == count - 1


def test_torchs_to(path):
    loader = loader_on(path, Numbered(4, SIZES))
    assert_finds_it(loader, lambda batch: {name: tensor.to(DEVICE) for name, tensor in batch.items()})


def test_lightning(path):
    utilities = pytest.importorskip("lightning.fabric.utilities")
    assert_finds_it(
        loader_on(path, Numbered(4, SIZES)), lambda batch: utilities.move_data_to_device(batch, DEVICE)
    )


def test_accelerate(path):
    operations = pytest.importorskip("accelerate.utils.operations")

    def move(batch):
        return operations.send_to_device(batch, DEVICE, non_blocking=True)

    assert_finds_it(loader_on(path, Numbered(4, SIZES)), move)


def test_transformers(path):
    trainer = pytest.importorskip("transformers.trainer")

    def move(batch):
        arguments = types.SimpleNamespace(device=DEVICE)
        this = types.SimpleNamespace(args=arguments, is_deepspeed_enabled=False)
        this._prepare_input = lambda data: trainer.Trainer._prepare_input(this, data)
        return this._prepare_input(batch)

    assert_finds_it(loader_on(path, Numbered(4, SIZES)), move)


def test_a_batch_encoding(path):
    """Of transformers: a mapping that moves itself, in place."""
    tokenization = pytest.importorskip("transformers.tokenization_utils_base")

    class Encodings(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return tokenization.BatchEncoding({"0": bytes_of(number, 100), "1": bytes_of(number + 1, LARGE)})

    loader = loader_on(path, Encodings())
    assert {type(batch) for batch in loader} == {tokenization.BatchEncoding}
    assert_finds_it(loader, lambda batch: batch.to(DEVICE))
