"""Streams, and copies of batches on streams that are late."""

from __future__ import annotations

import torch

from accelerator import pretend
from accelerator.moved import DEVICE, LARGE, assert_numbered
from ringloader._features.device import device_copy

# Three are small: they cross together. Words and bytes.
SIZES = (100, 1000, 33, LARGE)


def streams(count, device=DEVICE):
    """Returns new streams. torch hands out 32 in turn, of which one is that of the copies.

    What a user allocates on that one may be memory of a batch that another stream still reads, if nothing
    shows the batch's tensors.
    """
    found = []
    while len(found) < count:
        stream = torch.Stream(device=device)
        if stream not in device_copy._streams.values():
            found.append(stream)
    return found


class Kept:
    """Copies of batches, made on streams that are late, of batches that are gone by then."""

    def __init__(self):
        self._kept = []

    def keep(self, batch, number):
        copies = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
        for name, tensor in batch.items():
            copies[name].copy_(tensor, non_blocking=True)
            # Memory that this test has allocated is its own matter.
            copies[name].record_stream(torch.accelerator.current_stream())
        self._kept.append((copies, number))

    def check(self):
        pretend.synchronize()
        for batch, number in self._kept:
            assert_numbered(batch, number)


def drain(iterator, number):
    for batch in iterator:
        assert_numbered(batch, number)
        number += 1
    return number
