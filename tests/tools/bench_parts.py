"""Loaders, figures and a program for tests of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from ringloader._tools.bench import Configuration, Figures, Measurement

TORCH, OURS = Configuration("torch", 2), Configuration("ringloader", 2)
THREADS = Configuration("ringloader", 2, "thread")
AUTO = Configuration("ringloader", "auto")


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index**2)


@dataclass
class Returning:
    """Stands for a target whose function was found."""

    make: Any
    asked: int | None = None
    name: str = "make"

    def call(self, num_workers):
        self.asked = num_workers
        return self.make()


def rate_of(rate, *, step=0.0, memory=0):
    return Measurement(Figures(rate, 0.5, 1000, memory, step), 2, None)


def write_demo(folder):
    """Writes a file of the user's, and returns its path."""
    path = folder / "demo.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "def make(num_workers=1):\n"
        "    return DataLoader(range(64), batch_size=4, shuffle=True, num_workers=num_workers)\n"
        "def fails():\n"
        "    raise ValueError('no data\\nat all')\n"
        "def ends():\n"
        "    sys.exit(3)\n"
        "def is_killed():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def waits():\n"
        "    print(os.getpid(), file=open('started', 'w'), flush=True)\n"
        "    time.sleep(60)\n"
        "number = 3\n"
        "if __name__ == '__main__':\n"
        "    hidden = make\n"
    )
    return path
