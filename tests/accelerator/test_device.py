"""`device=`: what comes out is what torch's loader gives, moved by `.to()`; how many copies that takes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ringloader
from accelerator import pretend
from accelerator.moved import (
    DEVICE,
    KIBI,
    LARGE,
    OTHER,
    PATHS,
    Numbered,
    assert_numbered,
    bytes_of,
    loader_on,
    path,
    registrar,
    two_devices,
)
from ringloader import DataLoader
from small_datasets import Made

pytestmark = pytest.mark.rings_only

__all__ = ["path", "registrar"]


class Pair(NamedTuple):
    first: Any
    second: Any


class Tagged(dict):
    """A mapping with something else to it."""

    tag = None


class Movable:
    """An object that moves itself, as the batches of libraries do."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.asked = ()

    def to(self, device, non_blocking=False):
        moved = Movable(self.tensor.to(device, non_blocking=non_blocking))
        moved.asked = (str(device), non_blocking)
        return moved


class Plainly:
    """An object whose method takes nothing but the device."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Plainly(self.tensor.to(device))


@dataclasses.dataclass
class Record:
    tensor: torch.Tensor


def tagged(number):
    made = Tagged(x=bytes_of(number, 8))
    made.tag = number
    return made


def shared(number):
    both = bytes_of(number, 64)
    return [both[:32], both[32:], both]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
]

TREES = {
    "tensor": lambda number: bytes_of(number, 100),
    "large": lambda number: bytes_of(number, LARGE),
    "at the limit": lambda number: [bytes_of(number, 64 * KIBI), bytes_of(number, 64 * KIBI + 1)],
    "dtypes": lambda number: [torch.full((3, 5), number).to(dtype) for dtype in DTYPES],
    "large dtypes": lambda number: [torch.full((300, 300), number).to(dtype) for dtype in DTYPES],
    "scalars": lambda number: {"a": torch.tensor(number), "b": torch.tensor(number * 1.5)},
    "many": lambda number: {f"{at}": bytes_of(number + at, 1024) for at in range(40)},
    "more than a block": lambda number: [bytes_of(number + at, 60 * KIBI) for at in range(40)],
    "nested": lambda number: ({"a": [bytes_of(number, 3)], "b": (bytes_of(number, 5), "text")}, number, None),
    "named tuple": lambda number: Pair(bytes_of(number, 3), [bytes_of(number, 5)]),
    "permuted": lambda number: torch.full((4, 6, 8), number).permute(2, 0, 1),
    "large permuted": lambda number: torch.full((40, 60, 80), number).permute(2, 0, 1),
    "channels last": lambda number: (
        (torch.arange(96.0) + number).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    ),
    "expanded": lambda number: torch.tensor([[number]]).expand(3, 4),
    "large expanded": lambda number: torch.arange(300).expand(400, 300) + number,
    "with gaps": lambda number: torch.arange(100)[::3] + number,
    "a gap in the slot": lambda number: bytes_of(number, 400).view(20, 20)[:, 3:9],
    "empty": lambda number: [torch.empty(0, 3), bytes_of(number, 4)],
    "shared": shared,
    "twice": lambda number: [bytes_of(number, 40)] * 2,
    "arrays": lambda number: {"array": np.full(4, number), "tensor": bytes_of(number, 40)},
    "strings": lambda number: ["a", f"{number}", b"bytes"],
    "bytes": lambda number: [b"b" * 9000, bytes_of(number, 3)],
    "mapping": tagged,
    "counter": lambda number: collections.Counter(a=number),
    "proxy": lambda number: [types.SimpleNamespace(x=number), bytes_of(number, 9)],
    "range": lambda number: [range(number), bytes_of(number, 9)],
    "deque": lambda number: [collections.deque([number]), bytes_of(number, 9)],
    "default dict": lambda number: collections.defaultdict(list, a=[bytes_of(number, 9)]),
    "user list": lambda number: collections.UserList([bytes_of(number, 9)]),
    "parameter": lambda number: torch.nn.Parameter(torch.full((3,), float(number)), requires_grad=False),
    "requires grad": lambda number: torch.full((3,), float(number), requires_grad=True),
    "sparse": lambda number: torch.eye(3).mul(number + 1).to_sparse(),
    "conjugate": lambda number: torch.full((3,), complex(number, 1)).conj(),
    "packed sequence": lambda number: pack_sequence([torch.full((3,), number), torch.full((2,), number)]),
    "movable": lambda number: [Movable(bytes_of(number, 9)), bytes_of(number, 9)],
    "large movable": lambda number: [Movable(bytes_of(number, LARGE)), bytes_of(number, LARGE)],
    "plainly": lambda number: Plainly(bytes_of(number, 9)),
    "record": lambda number: [Record(bytes_of(number, 9)), bytes_of(number, 9)],
    "shapes differ": lambda number: [
        bytes_of(number, 10 * number + 1),
        bytes_of(number, LARGE * (number % 2 + 1)),
    ],
}


def moved(data: Any) -> Any:
    """Moves a batch of torch's as a program does."""
    if isinstance(data, (torch.Tensor, Movable, Plainly, PackedSequence)):
        return data.to(DEVICE)
    if isinstance(data, Pair):
        return Pair(*map(moved, data))
    if isinstance(data, (list, tuple)):
        return type(data)(map(moved, data))
    if isinstance(data, (dict, collections.UserList)) and not isinstance(data, collections.Counter):
        made = copy.copy(data)
        for key, item in data.items() if isinstance(data, dict) else enumerate(data):
            made[key] = moved(item)
        return made
    return data


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().reshape(-1).contiguous().view(torch.uint8)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        for name in ("device", "dtype", "shape", "layout", "requires_grad", "is_leaf"):
            assert getattr(one, name) == getattr(other, name), name
        if one.layout == torch.strided:
            assert one.stride() == other.stride()
            assert torch.equal(bits_of(one), bits_of(other))
        else:
            assert torch.equal(one.cpu().to_dense(), other.cpu().to_dense())
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple, collections.UserList, collections.deque)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif hasattr(one, "__dict__"):
        for name in vars(one):
            if name != "asked":
                assert_same(vars(one)[name], vars(other)[name])
    else:
        assert one == other


# This backend has none.
NOT_MOVED = {"sparse"}


def assert_torchs_moved(path, kind):
    makes = kind if isinstance(kind, list) else [TREES[kind]]
    count = 4 * len(makes)
    dataset = Made(lambda number: makes[number // 4](number % 4), count)
    # A worker of torch's would send the batches as they are.
    theirs = torch.utils.data.DataLoader(dataset, batch_size=None)
    expected = [moved(batch) for batch in theirs]
    with pretend.delayed(1000):
        found = list(loader_on(path, dataset, num_workers=1))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert pretend.violations() == []


@pytest.mark.parametrize("name", [name for name in TREES if name not in {*NOT_MOVED, "requires grad"}])
def test_batches_are_torchs_moved(name):
    assert_torchs_moved("native", name)


def test_batches_of_all_kinds_are_torchs_moved(path):
    # torch cannot send the first, and forgets of the second what it is.
    cannot = {*NOT_MOVED, *(() if path == "no workers" else ("requires grad", "conjugate"))}
    makes = [make for name, make in TREES.items() if name not in cannot]
    assert_torchs_moved(path, makes)


@pytest.mark.usefixtures("registrar")
@pytest.mark.parametrize("name", [name for name in TREES if "large" in name or name == "shapes differ"])
def test_batches_out_of_registered_slots_are_torchs_moved(name):
    assert_torchs_moved("native", name)


def test_what_moves_itself_is_told_how(path):
    one, _ = next(iter(loader_on(path, Made(TREES["movable"], 5))))
    assert one.asked == (str(DEVICE), True)


def test_what_a_mapping_has_beside_its_items_stays(path):
    assert [batch.tag for batch in loader_on(path, Made(TREES["mapping"], 5))] == list(range(5))


@pytest.mark.parametrize(
    "device",
    [DEVICE, pretend.NAME, 0, "auto"]
    + [pytest.param(other, marks=two_devices) for other in (OTHER, str(OTHER), 1)],
)
def test_on_the_device_that_is_named(path, device):
    expected = OTHER if device in (OTHER, str(OTHER), 1) else DEVICE
    for number, batch in enumerate(loader_on(path, Numbered(4, (100, LARGE)), device=device)):
        assert {tensor.device for tensor in batch.values()} == {expected}
        assert_numbered(batch, number)


@two_devices
def test_without_an_index_on_the_device_that_is_current_when_the_first_batch_is_moved(path):
    iterator = iter(loader_on(path, Numbered(4, (100,)), device=pretend.NAME))
    torch.accelerator.set_device_index(1)
    try:
        first = next(iterator)
        torch.accelerator.set_device_index(0)
        assert first["0"].device == next(iterator)["0"].device == OTHER
    finally:
        torch.accelerator.set_device_index(0)


@pytest.mark.parametrize("device", [DEVICE, pytest.param(OTHER, marks=two_devices)])
def test_the_current_device_and_stream_stay(path, device):
    stream = torch.Stream(device=DEVICE)
    with pretend.on_stream(stream):
        for _ in loader_on(
            path, Numbered(4, (100, LARGE)), device=device, device_transform=lambda batch: batch
        ):
            assert torch.accelerator.current_device_index() == 0
            assert torch.accelerator.current_stream() == stream


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_on_the_cpu_nothing_is_moved(path, device):
    for number, batch in enumerate(loader_on(path, Numbered(4, (100, LARGE)), device=device)):
        assert batch["0"].device.type == "cpu"
        assert_numbered(batch, number)
    assert pretend.counters()["copies_to_device"] == 0


def test_on_the_cpu_the_transform_runs_too(path):
    loader = loader_on(
        path, Numbered(4, (100,)), device="cpu", device_transform=lambda batch: batch["0"].float()
    )
    for number, batch in enumerate(loader):
        assert batch.equal(bytes_of(number, 100).float())


def copies_of(path, sizes, count=8, **options):
    """Copies of each batch, and the bytes of it that the host has copied to pinned memory."""
    iterator = iter(loader_on(path, Numbered(count, sizes), device_prefetch=0, **options))
    told = []
    for _ in range(count):
        before = ringloader.report(iterator).counters, pretend.counters()
        next(iterator)
        after = ringloader.report(iterator).counters, pretend.counters()
        issued = after[0]["device_copies"] - before[0]["device_copies"]
        assert issued == after[1]["copies_to_device"] - before[1]["copies_to_device"]
        told.append((issued, after[0]["device_staged_bytes"] - before[0]["device_staged_bytes"]))
    counters = ringloader.report(iterator).counters
    assert counters["device_batches"] == count
    assert counters["device_registered_bytes"] == pretend.counters()["registered_bytes"]
    assert pretend.violations() == [] and pretend.counters()["snapshots"] == 0
    return told


def test_small_tensors_take_one_copy(path):
    told = copies_of(path, (1024,) * 40)
    assert {copies for copies, _ in told} == {1}


def test_small_tensors_that_are_many_take_a_copy_for_each_block(path):
    told = copies_of(path, (64 * KIBI,) * 40)
    assert {copies for copies, _ in told} == {3}


def test_large_tensors_take_a_copy_each(path):
    told = copies_of(path, (1024, 2048, 100, LARGE, LARGE, 2 * LARGE))
    assert {copies for copies, _ in told} == {4}


@pytest.mark.usefixtures("registrar")
def test_large_tensors_are_copied_out_of_registered_slots():
    told = copies_of("native", (LARGE, 4 * LARGE), count=40)
    assert {staged for _, staged in told} == {0, 5 * LARGE}
    slots = sum(staged > 0 for _, staged in told)
    # Each slot once before it is registered.
    assert slots <= 10


@pytest.mark.usefixtures("registrar")
def test_registered_memory_is_told_and_given_back():
    loader = loader_on("native", Numbered(60, (LARGE,)))
    for number, batch in enumerate(loader):
        assert_numbered(batch, number)
    told = ringloader.report(loader).counters["device_registered_bytes"]
    assert told == pretend.counters()["registered_bytes"] > 0
    del loader, batch
    gc.collect()
    assert pretend.counters()["registered_bytes"] == 0
    assert pretend.counters()["violations"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("registrar")
def test_a_series_of_epochs_is_bounded(record_property):
    loader = loader_on("native", Numbered(12, (100, LARGE)), max_shared_bytes=16 << 20)
    assert pretend.counters()["registered_bytes"] == 0
    # Memory that other tests have left in torch's caches must not be counted.
    torch.pretend.empty_cache()
    torch.ops.pretend.empty_host_cache()
    begun = pretend.counters()
    series = []
    for _ in range(20):
        for number, batch in enumerate(loader):
            assert_numbered(batch, number)
        found = pretend.counters()
        names = ("registered_bytes", "pinned_bytes", "device_reserved_bytes")
        series.append([found[name] - begun[name] for name in names])
    record_property("registered, pinned, reserved on the device", series)
    # Later epochs may use a slot more, or a block more at once; no epoch adds to what was there.
    registered, pinned, reserved = map(max, zip(*series, strict=True))
    assert registered <= 10 * 2 * LARGE and pinned <= 1 << 20 and reserved <= 8 * (LARGE + 4096), series


@pytest.mark.usefixtures("registrar")
def test_the_next_epoch_without_a_device_has_memory_that_is_not_registered():
    loader = loader_on("native", Numbered(30, (LARGE,)))
    list(loader)
    assert pretend.counters()["registered_bytes"] > 0
    ringloader.convert(loader, device=None)
    batch = next(iter(loader))
    assert not batch["0"].is_pinned()
    assert pretend.counters()["registered_bytes"] == 0


@pytest.mark.usefixtures("registrar")
def test_where_registering_is_refused_pinned_memory_is_used():
    pretend.fail("registration", times=-1)
    told = copies_of("native", (LARGE,))
    assert {staged for _, staged in told} == {LARGE}


@pytest.mark.usefixtures("registrar")
def test_batches_that_are_larger_than_a_share(caplog):
    loader = loader_on("native", Numbered(6, (100, 3 << 20)), max_shared_bytes=2 << 20)
    with pretend.delayed(5000):
        for number, batch in enumerate(loader):
            assert_numbered(batch, number)
    assert ringloader.report(loader).counters["oversize"] == 6
    assert len([one for one in caplog.records if "max_shared_bytes" in one.message]) == 1
    assert pretend.violations() == []


def test_pin_memory_adds_nothing(path):
    loader = loader_on(path, Numbered(6, (100, LARGE)), pin_memory=True)
    iterator = iter(loader)
    # If torch's own loader runs, its thread pins, and the batches are moved then.
    is_torchs = path == "torch"
    assert (iterator._pin_memory, hasattr(iterator, "_pin_memory_thread")) == (is_torchs, is_torchs)
    for number, batch in enumerate(iterator):
        assert_numbered(batch, number)
    if path == "native":
        assert ringloader.report(loader).path == "native"


def test_each_tensor_has_a_version_of_its_own(path):
    batch = next(iter(loader_on(path, Numbered(2, (64, 64)))))
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    product = weight * batch["0"]
    batch["1"].add_(1)
    product.sum().backward()
    assert batch["0"]._version != batch["1"]._version
    assert not any(tensor._is_view() for tensor in batch.values())


def test_record_stream_works(path):
    stream = torch.Stream(device=DEVICE)
    for tensor in next(iter(loader_on(path, Numbered(2, (64, LARGE))))).values():
        tensor.record_stream(stream)


@two_devices
def test_a_converted_loader_and_an_installed_one():
    dataset = Numbered(4, (100,))
    loader = ringloader.convert(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2), device=1
    )
    assert {batch["0"].device for batch in loader} == {OTHER}
    with ringloader.installed(device="auto", device_prefetch=1):
        for workers in (0, 2):
            plain = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
            assert {batch["0"].device for batch in plain} == {DEVICE}
            # The options of our loader count.
            ours = DataLoader(dataset, batch_size=None, num_workers=workers)
            assert {batch["0"].device.type for batch in ours} == {"cpu"}


def test_what_is_installed_moves_nothing_in_a_worker():
    class Nested(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, number):
            found = list(torch.utils.data.DataLoader(Numbered(2, (100,)), batch_size=None))
            assert [batch["0"].device.type for batch in found] == ["cpu", "cpu"]
            return found[1]

    with ringloader.installed(device="auto"):
        for workers in (1, 2):
            for batch in torch.utils.data.DataLoader(Nested(), batch_size=None, num_workers=workers):
                assert batch["0"].device == DEVICE
                assert_numbered(batch, 1)


def test_an_iterator_of_another_kind(monkeypatch):
    def replaced(_):
        return iter([{"x": bytes_of(0, 100)}, {"x": bytes_of(1, LARGE)}])

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", replaced)
    iterator = iter(loader_on("native", [1, 2]))
    found = list(iterator)
    assert [batch["x"].device for batch in found] == [DEVICE, DEVICE]
    assert torch.equal(found[1]["x"].cpu(), bytes_of(1, LARGE))


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs(path, persistent):
    loader = loader_on(path, Numbered(8, (100, LARGE)), persistent_workers=persistent)
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert_numbered(batch, number)
    assert number == 7


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_iterable_dataset(path, in_order, prefetch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield from (
                bytes_of(number, 50)
                for number in range(info.id if info else 0, 9, info.num_workers if info else 1)
            )

    loader = loader_on(path, Stream(), in_order=in_order, device_prefetch=prefetch)
    found = sorted(bytes(batch.cpu().tolist()) for batch in loader)
    assert found == sorted(bytes(bytes_of(number, 50).tolist()) for number in range(9))


def test_in_inference_mode_tensors_are_ordinary_ones(path):
    loader = loader_on(path, Numbered(6, (100, LARGE)))
    with torch.inference_mode():
        batches = list(loader)
    assert not any(tensor.is_inference() for batch in batches for tensor in batch.values())


def test_under_another_default_device(path):
    iterator = iter(loader_on(path, [{"0": bytes_of(0, 100), "1": bytes_of(1, LARGE)}] * 4))
    with torch.device("meta"):
        batches = list(iterator)
    for batch in batches:
        assert_numbered(batch, 0)


def test_paths_are_those_that_are_meant(path):
    loader = loader_on(path, Numbered(2, (100,)), num_workers=1)
    list(loader)
    assert ringloader.report(loader).path == ("single-process" if path == "no workers" else path)
    assert path in PATHS


def test_a_transform_that_has_the_loader_keeps_it_no_longer_than_itself(path):
    class Program:
        def __init__(self):
            self.loader = loader_on(path, Numbered(4, (100,)), device_transform=self.transform)

        def transform(self, batch):
            return batch

    program = Program()
    assert len(list(program.loader)) == 4
    is_there = weakref.ref(program.loader)
    del program
    gc.collect()
    assert is_there() is None
