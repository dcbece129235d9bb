"""The benchmark compares the batches of two loaders."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_parts import Returning
from torch.utils.data import DataLoader as TorchLoader

from ringloader._tools.bench import measure
from ringloader._tools.bench.arguments import Configuration

pytestmark = pytest.mark.rings_only


Point = namedtuple("Point", "x y")


class Graph:
    def __init__(self, x):
        self.x = x
        self.edges = {"index": torch.zeros(2, 9)}


class Textless(Graph):
    def __repr__(self):
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), ("batch 1", "Tensor torch.int64 (2,) [1, 2]")),
        (torch.zeros(20), -torch.zeros(20), ("batch 1", "Tensor torch.float32 (20,) ")),
        (torch.zeros(2, 3), torch.zeros(3, 2), ("batch 1", "Tensor torch.float32 (2, 3)")),
        (np.zeros(20, "f4"), np.zeros(20, "f8"), ("batch 1", "ndarray float32 (20,)")),
        ({"a": [1, "x"]}, {"a": [1, "y"]}, ("batch 1['a'][1]", "str 'x'")),
        ({"a": 1}, {"b": 1}, ("batch 1", "dict ['a']")),
        ([1, 2], [1], ("batch 1", "list of 2")),
        ([1, 2], (1, 2), ("batch 1", "list of 2")),
        (Point(0, 1), Point(0, 1.0), ("batch 1[1]", "int 1")),
        (Graph(1), Graph(2), ("batch 1.x", "int 1")),
        ({1, 2}, {1, 3}, ("batch 1", "set ['1', '2']")),
        (range(3), range(4), ("batch 1", "range range(0, 3)")),
        (bytearray(b"a"), bytearray(b"b"), ("batch 1", "bytearray bytearray(b'a')")),
        (Path("a"), Path("b"), ("batch 1", "PosixPath PosixPath('a')")),
        (np.array([Graph(1)]), np.array([Graph(2)]), ("batch 1[0].x", "int 1")),
        (Textless(1), Textless(2), ("batch 1.x", "int 1")),
        ({Textless(1): 1}, {Textless(1): 2}, ("batch 1[Textless]", "int 1")),
        (
            torch.eye(2).to_sparse(),
            torch.zeros(2, 2).to_sparse(),
            ("batch 1", "Tensor torch.float32 (2, 2) "),
        ),
    ],
)
def test_the_first_difference_is_told(one, other, told):
    def described(value):
        return [list(measure._parts(part, "")) for part in ([0], value)]

    assert measure.difference(described(one), described(one)) is None
    place, expected, got = measure.difference(described(one), described(other))
    assert place == told[0]
    assert expected.startswith(told[1])
    assert got != expected


def test_objects_with_their_addresses_are_equal_all_the_same():
    for kind in (lambda: {Graph(1)}, lambda: np.array([Graph(1)]), lambda: {Graph(1): 1}):
        first, second = ([list(measure._parts(kind(), ""))] for _ in range(2))
        assert measure.difference(first, second) is None


def test_what_has_no_elements_or_lacks_a_field_is_described():
    @dataclass
    class Lacking:
        there: int = 1
        missing: int = field(init=False)

    assert list(measure._parts([torch.empty(20, device="meta"), Lacking()], ""))[-1] == (
        "[1].missing",
        "NoneType None",
    )


def test_parts_that_lead_back_or_out_end_there():
    inside = Graph(1)
    inside.itself, inside.kind = [inside], Graph
    assert list(measure._parts(inside, "")) == [
        ("", "Graph"),
        (".x", "int 1"),
        (".edges", "dict ['index']"),
        (".edges['index']", next(measure._parts(torch.zeros(2, 9), ""))[1]),
        (".itself", "list of 1"),
        (".itself[0]", "the Graph that it is a part of"),
        (".kind", "Graph"),
    ]


def test_an_epoch_that_ends_early_is_a_difference():
    def described(length):
        loader = TorchLoader(range(length))
        return measure.described(Returning(lambda: loader), Configuration("torch", 0))

    assert len(described(30)) == 20
    assert measure.difference(described(3), described(3)) is None
    assert measure.difference(described(4), described(3))[::2] == ("batch 3", "nothing")


def test_a_slow_loader_is_compared_by_what_it_gives_in_time(monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0)
    loader = TorchLoader(range(9))
    found = measure.described(Returning(lambda: loader), Configuration("torch", 0))
    assert found == [[("", "Tensor torch.int64 (1,) [0]")]]
