"""One value of every kind that users have ever put into a batch."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import typing
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Make = Callable[[], Any]

TENSOR_DTYPES = [
    name
    for name in [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ]
    if hasattr(torch, name)
]


def of_dtype(name: str, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Every byte is defined and small enough to be a valid bool."""
    dtype = getattr(torch, name)
    count = int(np.prod(shape))
    raw = torch.arange(count * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
    return raw.view(dtype).reshape(shape)


class SubTensor(torch.Tensor):
    """A tensor subclass with an attribute."""


def sub_tensor() -> SubTensor:
    value = torch.arange(4.0).as_subclass(SubTensor)
    value.tag = "kept"
    return value


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnOrdered(collections.OrderedDict):  # type: ignore[type-arg]
    pass


class OwnTuple(tuple):  # type: ignore[type-arg]
    pass


class OwnInt(int):
    pass


class OwnStr(str):
    pass


class OwnFloat(float):
    pass


class OwnArray(np.ndarray):  # type: ignore[type-arg]
    pass


Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    image: torch.Tensor
    label: int = 3


@dataclasses.dataclass
class Data:
    image: torch.Tensor
    tags: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    number: int


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = torch.arange(3)
        self.b = "b"


class Plain:
    """An ordinary object that holds tensors, as PyG's batches and BatchEncoding do."""

    def __init__(self) -> None:
        self.tensors = {"x": torch.arange(6.0).reshape(2, 3), "index": torch.tensor([[0, 1], [1, 0]])}
        self.again = self.tensors["x"]


class Reduced:
    """Pickles itself through a function."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return (Reduced, (self.tensor,))


class Color(enum.Enum):
    RED = 1


class Flag(enum.IntFlag):
    A = 1
    B = 2


def with_attributes(value: Any) -> Any:
    value.note = {"tensor": torch.arange(2)}
    return value


def quiet(make: Make) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def self_referencing() -> list[Any]:
    value: list[Any] = [1, torch.arange(2)]
    value.append(value)
    return value


def self_referencing_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"t": torch.arange(2)}
    value["me"] = [value]
    return value


def aliases() -> list[torch.Tensor]:
    x = torch.arange(12.0).reshape(3, 4)
    return [x, x[1:], x.t(), x[:, ::2], x.view(-1), x.view(torch.int32), x[2, 3]]


def large_aliases() -> dict[str, torch.Tensor]:
    x = torch.arange(40_000.0).reshape(200, 200)
    return {"tail": x[100:], "whole": x, "columns": x[:, 7], "t": x.t()}


def deep(levels: int) -> Any:
    value: Any = torch.tensor(1)
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def read_only() -> np.ndarray[Any, Any]:
    value = np.arange(5)
    value.flags.writeable = False
    return value


def array_and_tensor() -> list[Any]:
    array = np.arange(8.0)
    return [array, torch.from_numpy(array), array[2:]]


X = torch.arange(24.0).reshape(2, 3, 4)

TENSORS: dict[str, Make] = {
    **{f"dtype {name}": (lambda name=name: of_dtype(name)) for name in TENSOR_DTYPES},
    **{f"empty {name}": (lambda name=name: of_dtype(name, (0, 3))) for name in ("bool", "int64", "bfloat16")},
    **{
        f"0-d {name}": (lambda name=name: of_dtype(name, ()))
        for name in TENSOR_DTYPES
        if "float4" not in name
    },
    "zero-size": lambda: torch.empty(3, 0, 2),
    "zero-size, strided": lambda: torch.empty(4, 5)[:, 2:2],
    "no elements": lambda: torch.tensor([]),
    "one": lambda: torch.ones(1, 1, 1),
    "size-1 strides": lambda: torch.arange(4.0).as_strided((1, 4, 1), (77, 1, 5)),
    "channels_last": lambda: torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "channels_last 3d": lambda: torch.rand(2, 3, 2, 2, 2, generator=torch.Generator()).to(
        memory_format=torch.channels_last_3d
    ),
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "expanded scalar": lambda: torch.tensor(5.0).expand(1000),
    "transposed": lambda: X.transpose(0, 2),
    "every second": lambda: torch.arange(20)[1::2],
    "overlapping": lambda: torch.arange(6.0).as_strided((4, 3), (1, 1)),
    "unfolded": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "offset": lambda: torch.arange(1000.0)[993:],
    "8 KiB less one": lambda: torch.arange(8191, dtype=torch.int32).to(torch.uint8),
    "8 KiB": lambda: torch.arange(8192, dtype=torch.int32).to(torch.uint8),
    "8 KiB and one": lambda: torch.arange(8193, dtype=torch.int32).to(torch.uint8),
    "1 MiB": lambda: torch.arange(1 << 18, dtype=torch.int32),
    "many dimensions": lambda: torch.arange(2**10).reshape((2,) * 10),
    "64 dimensions": lambda: torch.ones((1,) * 64),
    "nan and inf": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "inference": lambda: _inference(),
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
    "requires_grad large": lambda: torch.ones(5000, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.arange(3)),
    "subclass": sub_tensor,
    "attribute": lambda: with_attributes(torch.arange(3)),
    "sparse coo": lambda: torch.eye(4).to_sparse(),
    "sparse coo, uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
    "sparse coo, empty": lambda: torch.sparse_coo_tensor(size=(3, 3)),
    "sparse csr": lambda: quiet(lambda: torch.eye(4).to_sparse_csr()),
    "sparse csc": lambda: quiet(lambda: torch.eye(4).to_sparse_csc()),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "nested": lambda: quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "aliases": aliases,
    "large aliases": large_aliases,
    "detached alias": lambda: (lambda x: [x, x.detach()])(torch.ones(3, requires_grad=True)),
    "of arrays over one memory": lambda: (lambda a: [torch.from_numpy(part) for part in (a, a[2:], a)])(
        np.arange(9.0)
    ),
    "untyped storage": lambda: torch.arange(5.0).untyped_storage(),
    "large untyped storage": lambda: torch.arange(5000.0).untyped_storage(),
    "typed storage": lambda: quiet(lambda: torch.arange(5.0).storage()),
    "tensor and its storage": lambda: (lambda x: [x, x.untyped_storage()])(torch.arange(5.0)),
    "1000 small": lambda: [torch.full((3,), number) for number in range(1000)],
    "many of middle size": lambda: [torch.full((3000,), float(number)) for number in range(40)],
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


ARRAYS: dict[str, Make] = {
    **{
        f"dtype {code}": (lambda code=code: np.arange(6).astype(code).reshape(2, 3))
        for code in ("?", "i1", "u1", "<i2", ">i2", "<u8", ">u8", "<f2", "<f4", ">f8", "<c8", ">c16", "g")
    },
    "C": lambda: np.arange(12.0).reshape(3, 4),
    "F": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": lambda: np.arange(20)[::2],
    "negative strides": lambda: np.arange(12).reshape(3, 4)[::-1, ::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "large": lambda: np.arange(1 << 17, dtype=np.float64),
    "large F": lambda: np.asfortranarray(np.arange(1 << 16).reshape(256, 256)),
    "structured": lambda: np.array([(1, 2.5, b"ab")], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "S3")]),
    "structured, nested": lambda: np.zeros(2, dtype=[("p", [("x", "f4"), ("y", "f4", (2,))])]),
    "structured, aligned": lambda: np.zeros(3, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "recarray": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "datetime64": lambda: np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    "timedelta64": lambda: np.array([1, 2], dtype="timedelta64[s]"),
    "object": lambda: np.array([1, "a", None, {"k": 2}], dtype=object),
    "object of tensors": lambda: np.array([torch.arange(2), None], dtype=object),
    "unicode": lambda: np.array(["a", "\u00e9\u4e2d"]),
    "dtype >U2": lambda: np.array(["a", "\u00e9\u4e2d"], dtype=">U2"),
    "bytes": lambda: np.array([b"a", b"bcd"]),
    "void": lambda: np.zeros(2, dtype="V5"),
    "zero-size": lambda: np.empty((0, 3), dtype=np.float32),
    "zero-size 2": lambda: np.empty((3, 0)),
    "0-d": lambda: np.array(7.5),
    "0-d string": lambda: np.array("text"),
    "read-only": read_only,
    "read-only F": lambda: np.broadcast_to(np.asfortranarray(np.eye(3)), (3, 3)),
    "read-only, from bytes": lambda: np.frombuffer(b"\0\1" * 8, dtype=">i2"),
    "read-only, transposed": lambda: np.broadcast_to(np.zeros((2, 3, 4)).transpose(2, 0, 1), (4, 2, 3)),
    "read-only, strided": lambda: np.frombuffer(b"\0\1" * 8, dtype=">i2")[::2],
    "read-only, empty": lambda: np.frombuffer(b"", dtype=np.uint8),
    "read-only dates": lambda: np.broadcast_to(np.array(["2020-01-01"], dtype=">M8[s]"), (1,)),
    "read-only, a date in a field": lambda: np.broadcast_to(
        np.zeros(2, [("at", "M8[s]"), ("b", ">i4")]), (2,)
    ),
    "read-only object": lambda: np.broadcast_to(np.array([None, "a"], dtype=object), (2,)),
    "transposed, swapped": lambda: np.arange(24).astype(">i4").reshape(2, 3, 4).transpose(2, 0, 1),
    "transposed unicode": lambda: np.array([[["a", "bc"]]] * 3).transpose(2, 0, 1),
    "transposed, strided": lambda: np.arange(48).reshape(2, 3, 8)[..., ::2].transpose(2, 0, 1),
    "subclass": lambda: with_attributes(np.arange(3).view(OwnArray)),
    "masked": lambda: np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
    "views of one": lambda: (lambda a: [a, a[1:], a.T])(np.arange(9.0).reshape(3, 3)),
    "with tensor": array_and_tensor,
    "misaligned": lambda: np.frombuffer(bytearray(17), dtype=np.uint8)[1:].view("<f8"),
    **{
        f"scalar {kind.__name__}": (lambda kind=kind: kind(3))
        for kind in (np.bool_, np.int8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64)
    },
    "scalar longdouble": lambda: np.longdouble("1.1"),
    "scalar datetime64": lambda: np.datetime64("2020-02-03T04:05"),
    "scalar str_": lambda: np.str_("a\u00e9"),
    "scalar bytes_": lambda: np.bytes_(b"a"),
    "scalar void": lambda: np.zeros(1, dtype=[("a", "i4")])[0],
    "dtype itself": lambda: np.dtype(">f8"),
}

OBJECTS: dict[str, Make] = {
    "None": lambda: None,
    "bools": lambda: [True, False],
    "ints": lambda: [0, -1, 2**31, -(2**63), 2**63 - 1, 2**63, 2**64, -(2**200)],
    "floats": lambda: [0.0, -0.0, 1e-320, float("inf"), float("-inf"), float("nan")],
    "complex": lambda: 1 + 2j,
    "strings": lambda: ["", "a", "\u00e9", "\u4e2d\u6587", "\U0001f600", "nul\0nul", "x" * 70_000],
    "lone surrogates": lambda: ["\ud800", "a\udfffb", {"\ud800": 1}],
    "bytes": lambda: [b"", b"\0\xff", bytearray(b"abc"), b"y" * 100_000],
    "10 MB of bytes": lambda: bytes(range(250)) * 40_000,
    "tuples": lambda: ((), (1,), (1, (2, (3, ()))), (torch.arange(2),)),
    "lists": lambda: [[], [1], [[]], [[[]]]],
    "dicts": lambda: {"b": 1, "a": {}, 3: [4], (1, 2): None, None: b"", 2.5: "x", True: "t"},
    "own keys": lambda: {OwnStr("k"): 1, Color.RED: 2, np.int64(3): 3},
    "sets": lambda: [{1, 2}, frozenset({"a"}), set()],
    "own list": lambda: with_attributes(OwnList([1, torch.arange(2)])),
    "own dict": lambda: with_attributes(OwnDict(a=torch.arange(2))),
    "own ordered": lambda: with_attributes(OwnOrdered(b=1, a=torch.arange(2))),
    "OrderedDict": lambda: collections.OrderedDict([("b", 1), ("a", 2)]),
    "defaultdict": lambda: collections.defaultdict(list, a=[torch.arange(2)]),
    "Counter": lambda: collections.Counter("abca"),
    "deque": lambda: list(collections.deque([1, 2], maxlen=3)),
    "own tuple": lambda: OwnTuple((1, torch.arange(2))),
    "own scalars": lambda: [OwnInt(3), OwnStr("s"), OwnFloat(2.5)],
    "namedtuple": lambda: Point(torch.arange(2), [1]),
    "typing.NamedTuple": lambda: Typed(torch.arange(3)),
    "torch.Size": lambda: torch.Size([1, 2]),
    "max result": lambda: tuple(torch.arange(6).reshape(2, 3).max(0)),
    "return type": lambda: torch.arange(6).reshape(2, 3).max(0),
    "dataclass": lambda: Data(torch.arange(3), ["a"]),
    "frozen dataclass": lambda: Frozen(torch.arange(3), 4),
    "slots": Slotted,
    "object": Plain,
    "reduced": lambda: Reduced(torch.arange(3)),
    "enums": lambda: [Color.RED, Flag.A | Flag.B],
    "types": lambda: [
        int,
        torch.Tensor,
        np.ndarray,
        Data,
        len,
        torch.float32,
        torch.device("cpu"),
        torch.strided,
    ],
    "dates": lambda: [
        str(datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)),
        datetime.date(2020, 1, 2).isoformat(),
    ],
    "numbers": lambda: [str(decimal.Decimal("1.10")), str(fractions.Fraction(1, 3))],
    "decimal": lambda: decimal.Decimal("1.10"),
    "paths": lambda: [str(pathlib.PurePosixPath("a/b")), str(uuid.UUID(int=5))],
    "range and slice": lambda: [range(3), slice(1, None)],
    "generator": lambda: torch.Generator().manual_seed(3),
    "module": lambda: torch.nn.Linear(2, 2, bias=False).requires_grad_(False).weight.zero_(),
    "the same list twice": lambda: (lambda x: [x, x, {"k": x}])([torch.arange(2)]),
    "the same dict twice": lambda: (lambda x: (x, [x]))({"a": torch.arange(2)}),
    "the same tensor twice": lambda: (lambda x: [x, {"again": x}])(torch.arange(2)),
    "the same array twice": lambda: (lambda x: [x, {"again": x}])(np.arange(2)),
    "the same object twice": lambda: (lambda x: [x, (x,)])(Plain()),
    "the same tuple twice": lambda: (lambda x: [x, [x]])((1, 2)),
    "shared between plain and object": lambda: (lambda x: [x.tensors["x"], x, x.tensors["x"][1:]])(Plain()),
    "self-referencing list": self_referencing,
    "self-referencing dict": self_referencing_dict,
    "deep": lambda: deep(200),
    "Ellipsis": lambda: str(type(...)),
    "1000 keys": lambda: {f"key {number}": number for number in range(1000)},
}

ALL: dict[str, Make] = {
    **{f"tensor: {name}": make for name, make in TENSORS.items()},
    **{f"array: {name}": make for name, make in ARRAYS.items()},
    **{f"object: {name}": make for name, make in OBJECTS.items()},
}
