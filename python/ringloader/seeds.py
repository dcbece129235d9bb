"""One source of seeds for the ranks and workers of an epoch."""

from __future__ import annotations

from typing import Any

import numpy

# The purposes of a stream of numbers.
_SHARED, _UNIQUE, _GENERATORS = range(3)
# Each part of a stream's name is one word, so that no two names are alike.
_MOST = 1 << 32


class Seeds:
    """Seeds for one epoch: shared by all ranks and workers, or unique to each.

    All seeds are computed from ``seed``, the epoch, the rank and the worker, by counter-based generators
    (Philox). No global generator is read or changed. Each seed is an int from 0 to ``2**63 - 1``, so
    ``random``, ``torch.manual_seed`` and ``numpy.random.default_rng`` accept it.

    Args:
        seed: An int from 0 to ``2**64 - 1``.
        epoch: The epoch.
        rank: This process's rank.
        shared_by_all: True if ``seed`` is the same in all ranks.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If an argument is out of range.
    """

    def __init__(self, seed: int, *, epoch: int = 0, rank: int = 0, shared_by_all: bool = True) -> None:
        self._seed = _checked("seed", seed, 1 << 64)
        self._epoch = _checked("epoch", epoch, _MOST)
        self._rank = _checked("rank", rank, _MOST)
        self._shared_by_all = shared_by_all
        self._workers: tuple[int, ...] = ()
        self._shared: Any = self._stream(_SHARED, self._epoch)
        self._unique: Any = self._stream(_UNIQUE, self._epoch, self._rank)

    @property
    def epoch(self) -> int:
        """The epoch of these seeds."""
        return self._epoch

    def shared(self) -> int:
        """Returns the next shared seed. Each rank and worker gets the same seed from its ``n``-th call.

        Raises:
            RuntimeError: If there are several ranks, and they may have different values of ``seed``.
        """
        if not self._shared_by_all:
            raise RuntimeError(
                "seeds.shared() must be equal on all ranks, but each rank draws its own base seed: pass the "
                "same DataLoader(seed=...) on all ranks"
            )
        return int(self._shared.random_raw()) >> 1

    def unique(self) -> int:
        """Returns the next unique seed: no other rank, worker, epoch or call gets it."""
        return int(self._unique.random_raw()) >> 1

    def spawn(self, worker_id: int) -> Seeds:
        """Returns the seeds of a worker of this process.

        The worker's shared seeds continue from this object's position. Its unique seeds are its own. Each
        call of ``spawn`` with the same number gives the same unique seeds.

        Args:
            worker_id: The worker's number.

        Raises:
            TypeError: If ``worker_id`` is not an int.
            ValueError: If ``worker_id`` is negative.
        """
        made = Seeds(self._seed, epoch=self._epoch, rank=self._rank, shared_by_all=self._shared_by_all)
        made._workers = (*self._workers, _checked("worker_id", worker_id, _MOST))
        made._shared.state = self._shared.state
        made._unique = made._stream(_UNIQUE, self._epoch, self._rank, *made._workers)
        return made

    def generator_words(self, count: int) -> list[int]:
        """Returns 32-bit words for seeding generators, from a stream that no seed is drawn from."""
        sequence = self._sequence(_GENERATORS, self._epoch, self._rank, *self._workers)
        return [int(word) for word in sequence.generate_state(count)]

    def _stream(self, *name: int) -> Any:
        return numpy.random.Philox(self._sequence(*name))

    def _sequence(self, *name: int) -> Any:
        words = [self._seed % _MOST, self._seed // _MOST]
        return numpy.random.SeedSequence(words, spawn_key=name)


def _checked(name: str, value: object, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not 0 <= value < below:
        raise ValueError(f"{name} must be from 0 up to and without {below}, not {value}")
    return value
