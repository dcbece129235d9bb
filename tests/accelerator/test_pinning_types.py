"""`pin_memory=True` beside torch's own loader: each type of a batch and of its parts."""

from __future__ import annotations

import array
import collections
import dataclasses
import threading
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.data

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN, Sized, told
from accelerator.pinning_parts import MIB, Pins, PinsBadly, large, on_each_path, ones, whole
from parity.datasets import Samples, identity
from parity.harness import Case, compare


@pytest.fixture(autouse=True)
def _paths(request: pytest.FixtureRequest, _as_new: None) -> Iterator[None]:
    yield from on_each_path(request)


class Point(NamedTuple):
    x: Any
    y: Any = 3


@dataclasses.dataclass
class Data:
    image: torch.Tensor


class PinsWithArguments:
    def pin_memory(self, _device: Any) -> Any:
        return "never called"


class PinIsNoMethod:
    pin_memory = 3


class PinnedDict(dict):  # type: ignore[type-arg]
    def pin_memory(self) -> Any:
        return "a dict, and asked itself"


class FrozenMapping(Mapping):  # type: ignore[type-arg]
    def __init__(self, content: Any) -> None:
        self.content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class NotMadeOfOne(FrozenMapping):
    def __init__(self, *content: Any) -> None:
        super().__init__(content)

    def __reduce__(self) -> Any:
        return (NotMadeOfOne, tuple(self.content.items()))


class OwnMapping(MutableMapping):  # type: ignore[type-arg]
    """A mapping whose copy shares the content, and keeps what is beside it."""

    def __init__(self, content: Any) -> None:
        self.content = dict(content)
        self.beside = "kept"

    def __getitem__(self, key: Any) -> Any:
        return self.content[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class OwnSequence(Sequence):  # type: ignore[type-arg]
    def __init__(self, content: Any) -> None:
        self.content = list(content)

    def __getitem__(self, index: Any) -> Any:
        return self.content[index]

    def __len__(self) -> int:
        return len(self.content)


class OwnList(list):  # type: ignore[type-arg]
    pass


class NoWriting(list):  # type: ignore[type-arg]
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("may not be written")


class OwnTuple(tuple):  # type: ignore[type-arg]
    pass


class TupleOfTwo(tuple):  # type: ignore[type-arg]
    def __new__(cls, one: Any, other: Any) -> TupleOfTwo:
        return super().__new__(cls, (one, other))

    def __getnewargs__(self) -> Any:
        return tuple(self)


def views() -> Any:
    base = torch.arange(12.0)
    return [base[:6], base[6:], base[3:9], base]


def large_views() -> Any:
    base = large()
    return [base[:MIB], base[MIB:], base[MIB // 2 : -MIB // 2], base]


def twice(make: Any) -> Any:
    tensor = make()
    return [tensor, tensor, {"again": tensor}]


def list_twice() -> Any:
    inner = [ones()]
    return (inner, inner)


TYPES: dict[str, Any] = {
    "tensor": ones,
    "large tensor": large,
    "a mebi exactly": lambda: told(1, MIB),
    "around the limit": lambda: [told(1, (128 << 10) + more) for more in (-1, 0, 1)],
    "many small": lambda: {f"field {i}": torch.full((i,), i) for i in range(40)},
    "small and large": lambda: {
        "image": large(),
        "label": torch.tensor(7),
        "more": [large(torch.float32), "x"],
    },
    "nested": lambda: [{"a": (ones(), [ones(), {"b": ones()}])}, (), [], {}],
    "no tensor": lambda: {"a": 1, "b": "text", "c": b"bytes", "d": None, "e": 2.5, "f": True},
    "number": lambda: 3,
    "text": lambda: "text",
    "bytes": lambda: b"bytes",
    "none": lambda: None,
    "zero dimensions": lambda: torch.tensor(5),
    "empty": lambda: [torch.empty(0), torch.empty(3, 0), torch.empty(0, 2, dtype=torch.int64)],
    "views of one storage": views,
    "large views of one storage": large_views,
    "same tensor twice": lambda: twice(ones),
    "same large tensor twice": lambda: twice(large),
    "same list twice": list_twice,
    "transposed": lambda: ones().t(),
    "large transposed": lambda: large().view(1024, 2048).t(),
    "large permuted": lambda: large().view(2, 4, 512, 512).permute(0, 2, 3, 1),
    "large channels last": lambda: (
        large(torch.float32)[: 8 * 65536].view(2, 4, 256, 256).to(memory_format=torch.channels_last)
    ),
    "offset": lambda: torch.arange(10)[3:7],
    "large offset": lambda: large()[MIB // 2 :],
    "every other": lambda: torch.arange(10)[::2],
    "large every other": lambda: large()[::2],
    "large with gaps": lambda: large().view(2048, 1024)[:, :1000],
    "expanded": lambda: torch.ones(3).expand(4, 3),
    "large expanded": lambda: told(1, MIB).expand(3, MIB),
    "requires grad": lambda: ones().requires_grad_(),
    "large requires grad": lambda: large(torch.float32).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(ones()),
    "complex": lambda: torch.complex(ones(), ones()),
    "bool": lambda: torch.tensor([True, False]),
    "sparse": lambda: ones().to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "numpy": lambda: ones().numpy(),
    "numpy in a list": lambda: [ones().numpy(), ones()],
    "named tuple": lambda: Point(ones(), [ones()]),
    "named tuple in a dict": lambda: {"a": Point(large())},
    "dataclass": lambda: Data(ones()),
    "dataclass in a list": lambda: [Data(ones()), ones()],
    "set": lambda: {1, 2},
    "counter": lambda: collections.Counter("abca"),
    "counter of tensors": lambda: collections.Counter({"a": ones(), "b": 2}),
    "ordered dict": lambda: collections.OrderedDict(b=ones(), a=ones()),
    "default dict": lambda: collections.defaultdict(list, {"a": [ones()]}),
    "user dict": lambda: collections.UserDict(a=ones()),
    "user list": lambda: collections.UserList([ones(), 3]),
    "deque": lambda: collections.deque([ones(), "text"], maxlen=5),
    "chain map": lambda: collections.ChainMap({"a": ones()}, {"b": 2}),
    "simple namespace": lambda: types.SimpleNamespace(a=ones()),
    "frozen mapping": lambda: FrozenMapping({"a": ones()}),
    "mapping that is not made of one": lambda: NotMadeOfOne(("a", ones())),
    "own mapping": lambda: OwnMapping({"a": ones()}),
    "own sequence": lambda: OwnSequence([ones(), 2]),
    "own list": lambda: OwnList([ones(), 2]),
    "list that may not be written": lambda: NoWriting([ones(), 2]),
    "own tuple": lambda: OwnTuple([ones(), 2]),
    "tuple of two": lambda: TupleOfTwo(ones(), 2),
    "range": lambda: range(3),
    "range in a dict": lambda: {"range": range(3), "a": large()},
    "bytearray": lambda: bytearray(b"abc"),
    "array": lambda: array.array("i", [1, 2]),
    "own method": lambda: Pins(ones()),
    "own method in a list": lambda: [ones(), Pins(ones()), large()],
    "own method that raises": lambda: [ones(), PinsBadly()],
    "own method with arguments": lambda: [PinsWithArguments()],
    "attribute that is no method": lambda: [PinIsNoMethod()],
    "own method of a dict": lambda: PinnedDict(a=ones()),
    "a class": lambda: [torch.Tensor],
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "storage": lambda: ones().untyped_storage(),
    "generator": lambda: torch.Generator().manual_seed(3),
    "exception": lambda: [ValueError("an element"), ones()],
}


@pytest.mark.parametrize("name", TYPES)
def test_types(loader_class, name):
    # Several, so that some are pinned before their turn.
    compare(loader_class, Case(lambda: whole(TYPES[name], length=4)))


def test_types_mixed(loader_class):
    """Each after each: templates and memory of one batch are not another's."""
    compare(loader_class, Case(lambda: whole(*TYPES.values(), num_workers=2), epochs=2))


@pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins")
@pytest.mark.parametrize("size", [10, 2 * MIB])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_leaf_is_pinned_and_begins_its_block(loader_class, workers, size):
    """Else a copy to the device would record its stream on no block, or on another's."""
    loader = loader_class(
        Sized([size] * 6, parts=3), batch_size=None, collate_fn=identity, num_workers=workers, **PIN
    )
    for batch in loader:
        for leaf in batch.values():
            assert leaf.is_pinned()
            assert leaf.storage_offset() == 0
            assert leaf.untyped_storage().nbytes() == leaf.nbytes
            assert leaf.data_ptr() == leaf.untyped_storage().data_ptr()
            assert torch.equal(leaf.to(pretend.NAME).cpu(), leaf)


@pytest.mark.rings_only
@pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins")
def test_it_is_native():
    import ringloader

    iterator = iter(ringloader.DataLoader(Samples(4), num_workers=1, **PIN))
    report = ringloader.report(iterator)
    assert report.path == "native", report.reason
    assert len(list(iterator)) == 4
    assert not [thread for thread in threading.enumerate() if "pin" in thread.name.lower()]
