"""Datasets whose samples say where they were made, or go wrong."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Told(Dataset):
    """Each sample has its number, and the process that made it."""

    def __init__(self, count: int, seconds: float = 0.0, elements: int = 8) -> None:
        self.count, self.seconds, self.elements = count, seconds, elements

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((self.elements,), float(index)), os.getpid()


class Deadly(Told):
    """Kills each process that makes one of its samples."""

    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class DeadlyStream(IterableDataset):
    """Its second worker ends in the middle of its part."""

    def __iter__(self):
        for number in range(10):
            if number == 7 and get_worker_info().id == 1:
                os._exit(3)
            yield torch.tensor(number)


def numbers(batches) -> list[int]:
    return [int(number) for values, _ in batches for number in values[:, 0]]
