"""Gains of ``main_prefetch`` where batches are Python objects, which take long to unpickle.

Each round runs an epoch with it and one without, one after the other, for a caller that waits between two
batches (for a device), one that computes in torch, and one that computes in Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ringloader import DataLoader

BATCHES = 40
WORKERS = 2
AHEAD = 2
ROUNDS = 5
# The caller's time with a batch. Longer than a worker needs for its own part of them.
STEP_SECONDS = 0.03


class Token:
    """A small object, as texts are made of."""

    def __init__(self, number: int) -> None:
        self.text = f"token {number}"
        self.span = (number, number + 5)
        self.features = {"head": number - 1, "weight": number / 7}


class Texts:
    """Batches of so many tokens, which a worker makes once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.made: list[Token] | None = None

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> list[Token]:
        if self.made is None:
            self.made = [Token(number) for number in range(self.tokens)]
        return self.made


def waits() -> None:
    """Waits, as for a device."""
    time.sleep(STEP_SECONDS)


def computes_in_torch() -> None:
    """Computes without the interpreter."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        torch.mm(MATRIX, MATRIX)


def computes_in_python() -> None:
    """With it."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        sum(range(1000))


MATRIX = torch.rand(500, 500)


def identity(batch: Any) -> Any:
    """No collation."""
    return batch


def milliseconds(tokens: int, step: Callable[[], None], ahead: int) -> tuple[float, float]:
    """Of a batch from the second one on: in ``next``, and in all."""
    options: dict[str, Any] = {"batch_size": None, "num_workers": WORKERS, "collate_fn": identity}
    with DataLoader(Texts(tokens), prefetch_factor=4, main_prefetch=ahead, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        step()
        begun, in_next = time.perf_counter(), 0.0
        for _ in range(BATCHES - 1):
            in_next -= time.perf_counter()
            next(iterator)
            in_next += time.perf_counter()
            step()
        whole = time.perf_counter() - begun
        return in_next / (BATCHES - 1) * 1e3, whole / (BATCHES - 1) * 1e3


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| the caller | objects | ms in `next`, without | with | times the rate (range) |")
    print("|---|--:|--:|--:|--:|")
    for step in (waits, computes_in_torch, computes_in_python):
        for tokens in (100, 2000):
            rounds = [[milliseconds(tokens, step, ahead) for ahead in (0, AHEAD)] for _ in range(ROUNDS)]
            ratios = sorted(plain[1] / thread[1] for plain, thread in rounds)
            plain, thread = (median(one[0] for one in column) for column in zip(*rounds, strict=True))
            print(
                f"| {step.__name__.replace('_', ' ')} | {tokens} | {plain:.1f} | {thread:.1f} | "
                f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |",
                flush=True,
            )
