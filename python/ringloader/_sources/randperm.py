"""torch's ``randperm`` word by word: the same permutation and draws, without waiting for all of it.

Native code makes the permutation while it is read, of words that torch draws here.
MIRRORS torch TensorFactories.cpp::randperm_cpu
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

import ringloader._native as _native
from ringloader._torch import internals

# Below it, a permutation takes less time than a process needs to start.
_FEWEST = 1 << 16
# Words in one draw that only moves a generator on.
_SKIPPED_AT_ONCE = 1 << 20
# Elements that are made at once.
_ELEMENTS = 1 << 12
_LOWEST = torch.iinfo(torch.int64).min

_randperm = torch.randperm


def can(n: int) -> bool:
    """True if a permutation of ``n`` may be drawn word by word here and now."""
    return (
        _FEWEST <= n <= _native.Shuffle.MOST
        # Code that replaces the function, or puts a mode around it, means it.
        and torch.randperm is _randperm
        and internals.len_torch_function_stack() == 0
        and _is_as_expected()
    )


def words(generator: torch.Generator, count: int) -> torch.Tensor:
    """Draws ``count`` numbers of 32 bits: two to an int64, the first in the upper half.

    Of an odd last one, only the lower 31 bits are given: it chooses between two elements.
    """
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device="cpu")
    # From the lowest number on, the type alone is the upper bound: all 64 bits of two draws.
    pairs[: count // 2].random_(_LOWEST, None, generator=generator)
    if count % 2:
        last = torch.empty((), dtype=torch.int32, device="cpu").random_(generator=generator)
        pairs[-1] = int(last) << 32
    return pairs


def take_ahead(generator: torch.Generator, n: int) -> torch.Generator:
    """Moves ``generator`` on as ``randperm(n)`` does. Returns one that stands where it stood.

    Not in one step, as torch does: threads that draw from one generator at once get other numbers.
    """
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    left = n - 1
    scratch = torch.empty(min(left, _SKIPPED_AT_ONCE) // 2, dtype=torch.int64, device="cpu")
    while left > 1:
        pairs = scratch[: left // 2]
        pairs.random_(_LOWEST, None, generator=generator)
        left -= 2 * len(pairs)
    if left:
        words(generator, left)
    return twin


def word_by_word(n: int, generator: torch.Generator) -> Callable[[range], Iterator[bytes]]:
    """Returns a function that yields elements of ``randperm(n)`` at some positions, as bytes of int64.

    ``generator`` draws the words while they are read.
    """
    shuffle = _native.Shuffle(n)

    def read(positions: range) -> Iterator[bytes]:
        many = max(1, _ELEMENTS // positions.step)
        for first in range(0, len(positions), many):
            part = positions[first : first + many]
            if count := shuffle.missing(part[-1] + 1):
                shuffle.supply(words(generator, count), count)
            yield shuffle.read(part.start, part.step, len(part))

    return read


@functools.cache
def _is_as_expected() -> bool:
    """True if this torch makes a permutation of these words, in this way: compared once in a process."""
    for n in (512, 513):
        theirs, ours = torch.Generator().manual_seed(n), torch.Generator().manual_seed(n)
        made = b"".join(word_by_word(n, ours)(range(n)))
        if torch.randperm(n, generator=theirs).tolist() != memoryview(made).cast("q").tolist():
            return False
        if not torch.equal(theirs.get_state(), ours.get_state()):
            return False
    return True
