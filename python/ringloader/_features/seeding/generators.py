"""The generators of random numbers from which samples are made, set by a key and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

from ringloader._torch import stand_ins


class Global:
    """The generators of the process, from which datasets draw."""

    def set(self, key: int) -> None:
        """Sets all of them."""
        random.seed(key)
        # numpy and torch seed the same algorithm with 32 bits of a number: torch with the lower ones.
        numpy.random.seed(key >> 32)
        torch.default_generator.manual_seed(key)

    def set_words(self, words: list[int]) -> None:
        """Sets each of them by words of its own, of ten words of 32 bits."""
        random.seed(_joined(words[:4]))
        numpy.random.seed(words[4:8])
        torch.manual_seed(_joined(words[8:]))

    def states(self) -> Any:
        """Returns their states."""
        return random.getstate(), numpy.random.get_state(legacy=False), torch.default_generator.get_state()

    def put_back(self, states: Any) -> None:
        """Sets them to states that they had."""
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Puts the generators of the process back at the end of a block."""
    generators = Global()
    states = generators.states()
    try:
        yield
    finally:
        generators.put_back(states)


class OfThread:
    """The generators of a thread that is a worker. Has the methods of :class:`Global`."""

    def __init__(self, rng: Any) -> None:
        self._random = rng.random_generator
        self._torch = rng.torch_generator
        self._numpy = rng.numpy_generator.bit_generator

    def set(self, key: int) -> None:
        self._random.seed(key)
        self._numpy.state = type(self._numpy)(key).state
        self._torch.manual_seed(key)

    def set_words(self, words: list[int]) -> None:
        self._random.seed(_joined(words[:4]))
        self._numpy.state = type(self._numpy)(words[4:8]).state
        self._torch.manual_seed(_joined(words[8:]))

    def states(self) -> Any:
        return self._random.getstate(), self._numpy.state, self._torch.get_state()

    def put_back(self, states: Any) -> None:
        self._random.setstate(states[0])
        self._numpy.state = states[1]
        self._torch.set_state(states[2])


def _joined(words: list[int]) -> int:
    return int.from_bytes(b"".join(word.to_bytes(4, "little") for word in words), "little")


class Both:
    """The generators of the process, and those of a worker. Has the methods of :class:`Global`."""

    def __init__(self, *parts: Global | OfThread) -> None:
        self._parts = parts

    def set(self, key: int) -> None:
        for part in self._parts:
            part.set(key)

    def set_words(self, words: list[int]) -> None:
        for part in self._parts:
            part.set_words(words)

    def states(self) -> Any:
        return [part.states() for part in self._parts]

    def put_back(self, states: Any) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.put_back(state)


def of_this_worker() -> Global | OfThread | Both:
    """Returns the generators that a dataset draws from here."""
    info: Any = get_worker_info()
    if getattr(info, "worker_method", None) != "thread":
        return Global()
    return Both(Global(), OfThread(info.rng)) if stand_ins.is_in_worker_process() else OfThread(info.rng)
