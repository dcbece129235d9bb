"""Random batches.

Trees of every kind, with parts that are one object and tensors that share storages; and stretches of batches
that are alike but for their tensors' elements, until in one of them some small thing is another.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from parity.batch_values import ALL, Point
from parity.datasets import identity
from parity.harness import Case, compare

# Small ones that torch itself can send, and that may stand anywhere in a tree.
LEAVES = [
    name
    for name in ALL
    if not any(
        part in name
        for part in (
            "10 MB",
            "1 MiB",
            "1000",
            "many",
            "meta",
            "nested",
            "large",
            "sparse",
            "inference",
            "deep",
        )
    )
    # Each has a test of its own, which must not hide the rest of a tree.
    and not name.startswith(("array: dtype >", "array: zero-size", "object: own keys"))
]

DTYPES = [torch.float32, torch.uint8, torch.int64, torch.bfloat16, torch.bool, torch.complex64]

VALUES = [None, True, False, 0, 1, -(2**63), 0.0, -0.0, 1.0, float("nan"), "", "a", "bb", b"", b"c" * 5000]


class Trees(Dataset):
    """Sample `i` is the tree that the seed `(seed, i)` gives, the same in any process."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        return Grower(random.Random(f"{self.seed}/{index}")).tree(0)


class Grower:
    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.made: list[object] = []
        self.bases: list[torch.Tensor] = []

    def tree(self, depth: int) -> object:
        kind = self.choose.random()
        if self.made and kind < 0.12:
            return self.choose.choice(self.made)
        if depth < 4 and kind < 0.5:
            made = self.container(depth)
        elif kind < 0.75:
            made = self.view()
        else:
            made = ALL[self.choose.choice(LEAVES)]()
        self.made.append(made)
        return made

    def container(self, depth: int) -> object:
        children = [self.tree(depth + 1) for _ in range(self.choose.choice((0, 1, 2, 3, 5)))]
        kind = self.choose.choice(("list", "tuple", "dict", "array"))
        if kind == "list":
            if self.choose.random() < 0.1:
                children.append(children)
            return children
        if kind == "tuple":
            return tuple(children)
        if kind == "array":
            return np.arange(
                self.choose.randint(0, 3000), dtype=self.choose.choice(("<f4", "<i8", "u1", "<f2"))
            )
        return {self.choose.choice((f"k{n}", n, (n, "t"))): child for n, child in enumerate(children)}

    def view(self) -> torch.Tensor:
        """A view of a base that may have been viewed before, of any shape, strides and offset within it."""
        if not self.bases or self.choose.random() < 0.4:
            size = self.choose.choice((1, 7, 64, 2048, 2049, 9000))
            dtype = self.choose.choice(DTYPES)
            self.bases.append(
                (torch.arange(size) % 2 if dtype == torch.bool else torch.arange(size) % 250).to(dtype)
            )
        base = self.choose.choice(self.bases)
        room = base.numel()
        offset = self.choose.randrange(room)
        room -= offset
        shape, strides = [], []
        for _ in range(self.choose.randint(0, 4)):
            extent = self.choose.choice((1, 2, 3, 5))
            stride = self.choose.choice((0, 1, 2, 7, 40))
            if (extent - 1) * stride < room:
                room -= (extent - 1) * stride
                shape.append(extent)
                strides.append(stride)
        if self.choose.random() < 0.3:
            return base
        return base.as_strided(shape, strides, offset)


class Alike(Dataset):
    """Stretches of six samples of one structure. Now and then one node is another than its stretch has."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        own = random.Random(f"{self.seed}/{index}")
        odd = own.randrange(40)
        return Copier(f"{self.seed}/{index // 6}", own, odd).tree(0)


class Copier:
    """Grows a tree whose node `i` is what the seed `(stretch, i)` gives; number `odd` is its own."""

    def __init__(self, stretch: str, own: random.Random, odd: int) -> None:
        self.stretch = stretch
        self.own = own
        self.odd = odd
        self.nodes = 0

    def tree(self, depth: int) -> object:
        number, self.nodes = self.nodes, self.nodes + 1
        choose = self.own if number == self.odd else random.Random(f"{self.stretch}/{number}")
        if depth < 3 and (depth == 0 or choose.random() < 0.4):
            return self.container(choose, depth)
        return self.tensor(choose) if choose.random() < 0.6 else self.value(choose)

    def container(self, choose: random.Random, depth: int) -> object:
        kind = choose.choice(("list", "tuple", "dict", "named tuple", "twice"))
        length = choose.choice((0, 1, 2, 3, 5))
        if kind == "named tuple":
            return Point(self.tree(depth + 1), self.tree(depth + 1))
        if kind == "twice" and choose.random() < 0.3:
            return [self.tree(depth + 1)] * 2
        if kind != "dict":
            items = (self.tree(depth + 1) for _ in range(length))
            return tuple(items) if kind == "tuple" else list(items)
        names = [(f"k{n}", n, -n - 0.5, float("nan"), (n, "t"), b"%d" % n) for n in range(length)]
        choose.shuffle(names)
        return {choose.choice(each): self.tree(depth + 1) for each in names}

    def tensor(self, choose: random.Random) -> torch.Tensor:
        dtype = choose.choice(DTYPES)
        size = choose.choice((1, 2, 7, 64, 2048, 9000))
        flat = torch.tensor(list(self.own.randbytes(size)), dtype=torch.uint8)
        flat = (flat % 2 if dtype == torch.bool else flat).to(dtype)
        return choose.choice(
            (
                flat,
                flat[0],
                flat[:0],
                flat[size // 2 :],
                flat[::2],
                flat.expand(3, size),
                flat.view(1, size, 1),
                flat.as_strided((size // 2, 2), (1, 1)),
            )
        )

    def value(self, choose: random.Random) -> object:
        return choose.choice(VALUES)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@pytest.mark.parametrize(("dataset", "length"), [(Trees, 150), (Alike, 180)])
@pytest.mark.limit(300)
def test_random_batches(loader_class, dataset, length, seed):
    def build():
        return {
            "dataset": dataset(length, seed),
            "batch_size": None,
            "num_workers": 2,
            "collate_fn": identity,
        }

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == length
