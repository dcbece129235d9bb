"""Answers to a native stream that reads a sampler: ``_native.Draws``, as a class to derive from."""

from __future__ import annotations

from typing import Any

import torch

import ringloader._native as _native


class NoDraws:
    """Answers nothing: a stream asks only what torch's sampler of its kind reads and draws."""

    def open(self) -> _native.Stream | None:
        """Returns a stream, made when torch's generator would begin; None if Python must iterate."""
        raise NotImplementedError

    def odd_size(self, size: Any) -> int:
        """Returns what torch makes of a batch size that was set meanwhile and is no plain number."""
        raise NotImplementedError

    def seed(self) -> None:
        """Makes the epoch's own generator."""
        raise NotImplementedError

    def num_samples(self) -> int:
        """Returns the number of indices in one epoch."""
        raise NotImplementedError

    def permutation(self, n: int) -> torch.Tensor | None:
        """Returns ``torch.randperm(n)``, or None if the stream must make it of :meth:`words`."""
        raise NotImplementedError

    def words(self, count: int) -> torch.Tensor:
        """Returns the next words of the last permutation."""
        raise NotImplementedError

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Returns ``torch.randint(high, (count,))``."""
        raise NotImplementedError

    def multinomial(self) -> torch.Tensor:
        """All indices of an epoch, by weight."""
        raise NotImplementedError

    def leave(self, rest: list[Any]) -> None:
        """Keeps the incomplete last batch, with which the next epoch begins."""
        raise NotImplementedError
