"""`pin_memory=True` beside torch's own loader: each type, order, errors, epochs."""

from __future__ import annotations

import array
import collections
import dataclasses
import threading
import time
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.data

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN, Flow, Made, Sized, told
from faults.failing_datasets import Dies
from parity import harness, side_by_side
from parity.datasets import Order, Samples, SizedStream, Stream, identity
from parity.harness import Case, compare

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _paths(request: pytest.FixtureRequest, _as_new: None) -> Iterator[None]:
    before = harness.paths
    harness.paths = ("torch" if IS_NAMED else request.config.getoption("--path"),)
    with harness.taking(harness.paths[0]):
        yield
    harness.paths = before
    assert not pretend.violations()


def assert_same(scenario: Any, loader_class: Any) -> list[Any]:
    """As `side_by_side.assert_same`, on each path. Returns torch's steps."""
    for path in harness.paths:
        with harness.taking(path):
            steps = side_by_side.assert_same(scenario, loader_class)
    return steps


def whole(*makes: Any, length: int | None = None, **kwargs: Any) -> dict[str, Any]:
    """Elements as they are, from one worker."""
    options = {"num_workers": 1, "batch_size": None, "collate_fn": identity, **PIN, **kwargs}
    return {"dataset": Made(*makes, length=length), **options}


# -- The pinning of each type


class Point(NamedTuple):
    x: Any
    y: Any = 3


@dataclasses.dataclass
class Data:
    image: torch.Tensor


class Pins:
    """Has a method of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def pin_memory(self) -> Any:
        return ("mine", self.tensor.pin_memory())


class PinsBadly:
    def pin_memory(self) -> Any:
        raise KeyError("not today")


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


def ones() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def large(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return told(3, 2 * MIB).view(dtype)


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


# -- Sizes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_batches_whose_size_changes(loader_class, workers, parts):
    sizes = [1, 3 * MIB, 127 << 10, 128 << 10, 5, 129 << 10, MIB + 1, 0, 4 * MIB, 4 * MIB, 4 * MIB, 2, 64]
    compare(
        loader_class,
        Case(
            lambda: {
                "dataset": Sized(sizes, parts=parts),
                "batch_size": None,
                "collate_fn": identity,
                "num_workers": workers,
                **PIN,
            },
            epochs=2,
        ),
    )


@pytest.mark.parametrize("shared", [MIB, 4 * MIB, 64 * MIB])
def test_oversize_batches(loader_class, shared):
    """Oversize batches come in memory of their own."""
    sizes = [2 * MIB, 10, 3 * MIB, 3 * MIB, 600 << 10, 2 * MIB, 100]

    def scenario(kind, told):
        ours = {"max_shared_bytes": shared} if told.ours else {}
        loader = kind(Sized(sizes), batch_size=None, collate_fn=identity, num_workers=2, **PIN, **ours)
        for _ in range(2):
            told.iterate(loader)

    assert_same(scenario, loader_class)


def test_batches_that_are_kept(loader_class):
    """Nothing writes to a batch that the caller has, for as long as it lives."""
    sizes = [10, MIB, 200 << 10, 5] * 4
    loader = loader_class(Sized(sizes), batch_size=None, collate_fn=identity, num_workers=2, **PIN)
    pretend.set_poison(True)
    kept = [batch for _ in range(3) for batch in loader]
    assert all(
        torch.equal(batch, told(index, sizes[index]))
        for index, batch in zip(list(range(len(sizes))) * 3, kept, strict=True)
    )
    assert all(batch.is_pinned() for batch in kept)


def test_pinned_memory_comes_back(loader_class):
    def live() -> tuple[int, int]:
        counted = pretend.counters()
        return counted["pinned_live_blocks"], counted["pinned_live_bytes"]

    before = live()
    loader = loader_class(
        Sized([MIB] * 8 + [10] * 8), batch_size=None, collate_fn=identity, num_workers=2, **PIN
    )
    reserved = []
    for epoch in range(6):
        iterator = iter(loader)
        for _ in range(3 if epoch % 2 else 16):
            next(iterator)
        reserved.append(pretend.counters()["pinned_bytes"])
    del loader, iterator
    deadline = time.monotonic() + 10
    while live() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live() == before
    # torch's own keeps as many as were ever on their way.
    assert reserved[-1] <= reserved[1] + 8 * MIB


# -- Epochs, order, draws


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("size", [10, 300 << 10])
def test_abandoned_epochs(loader_class, persistent, size):
    def build():
        options = {"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
        return {
            "dataset": Sized([size] * 14),
            "generator": torch.Generator().manual_seed(4),
            **options,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=4, take=2))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_sampler_is_read_at_torchs_moments(loader_class, prefetch):
    def build():
        order = Order([[index] for index in range(12)], after=[[3]])
        return {
            "dataset": Samples(12),
            "batch_sampler": order,
            "num_workers": 2,
            "prefetch_factor": prefetch,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=2, take=5))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_sampler_is_read_between_hand_outs(loader_class, prefetch):
    """The moments themselves, and the thread."""

    def scenario(kind, told):
        log: list[Any] = []
        here = threading.get_ident()

        class Recording:
            def __iter__(self):
                for index in range(10):
                    log.append((index, threading.get_ident() == here))
                    yield index

        loader = kind(
            Sized([300 << 10] * 10), sampler=Recording(), num_workers=1, prefetch_factor=prefetch, **PIN
        )
        iterator = told.step("iter", lambda: iter(loader))
        for _ in range(11):
            # So that all that can be ahead is ahead.
            time.sleep(0.05)
            told.step("next", lambda: next(iterator))
            told.step("read", lambda: list(log))

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_sampler_that_raises(loader_class, fail_at):
    def build():
        return {
            "dataset": Samples(8),
            "sampler": Order(list(range(8)), fail_at=fail_at),
            "num_workers": 1,
            **PIN,
        }

    compare(loader_class, Case(build))


def test_out_of_order(loader_class):
    def build():
        return {
            "dataset": Sized([10, 300 << 10] * 8),
            "batch_size": None,
            "num_workers": 3,
            "in_order": False,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=2, unordered=True))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda: Stream((5, 2)), lambda: SizedStream((3, 3), declared=2), lambda: Flow([10, 300 << 10] * 5)],
)
def test_streams(loader_class, make, persistent):
    def build():
        return {"dataset": make(), "num_workers": 2, "batch_size": 2, "persistent_workers": persistent, **PIN}

    compare(loader_class, Case(build, epochs=3, take=3, ask_length=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_loaders_side_by_side(loader_class, workers):
    def scenario(kind, told):
        loaders = [kind(Sized([size] * 5), num_workers=workers, batch_size=None, **PIN) for size in (10, MIB)]
        told.step("zip", lambda: list(zip(*loaders, strict=True)))
        iterators = [iter(loaders[0]), iter(loaders[0]), iter(loaders[1])]
        for _ in range(6):
            for iterator in iterators:
                told.step("next", lambda iterator=iterator: next(iterator))

    assert_same(scenario, loader_class)


# -- Modes of the caller's thread, which torch's pinning thread is not in


MODES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: torch.device(pretend.NAME),
    "default device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize(
    "kind_of_batch", [lambda: [ones(), large()], lambda: ones().requires_grad_(), lambda: Pins(ones())]
)
@pytest.mark.parametrize("mode", MODES)
def test_modes(loader_class, mode, kind_of_batch):
    def scenario(kind, told):
        loader = kind(**whole(kind_of_batch, length=5))
        iterator = told.step("iter", lambda: iter(loader))
        told.drain(iterator, 2)
        with MODES[mode]():
            told.drain(iterator, 2)
        told.drain(iterator)

    assert_same(scenario, loader_class)


def test_default_dtype(loader_class):
    def scenario(kind, told):
        iterator = told.step("iter", lambda: iter(kind(**whole(large, ones, length=6))))
        torch.set_default_dtype(torch.float64)
        try:
            told.drain(iterator)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same(scenario, loader_class)


# -- Devices and warnings


@pytest.mark.skipif(IS_NAMED, reason="pins for the device that is named")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["cuda", pretend.NAME, f"{pretend.NAME}:1", "no such device"])
def test_pin_memory_device_is_warned_about(loader_class, name, workers):
    def build():
        return {"dataset": Samples(3), "num_workers": workers, "pin_memory": True, "pin_memory_device": name}

    expected, _ = compare(loader_class, Case(build, epochs=2))
    assert any("pin_memory_device is deprecated" in str(step.warnings) for step in expected.steps)


@pytest.mark.skipif(pretend.DEVICES < 2, reason="there is one device")
def test_another_current_device(loader_class):
    """Errors name it."""

    def scenario(kind, told):
        torch.accelerator.set_device_index(1)
        try:
            told.iterate(kind(**whole(ones, PinsBadly, length=4)))
        finally:
            torch.accelerator.set_device_index(0)

    steps = assert_same(scenario, loader_class)
    assert "in pin memory thread for device 1" in str(steps)


# -- Errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [10, 300 << 10])
def test_pinning_fails(loader_class, size, workers):
    """Pinned memory ends at the third allocation, and is there again."""

    def scenario(kind, told):
        loader = kind(Sized([size] * 6), num_workers=workers, batch_size=None, **PIN)
        pretend.fail("pinning", 3, 2)
        told.iterate(loader)
        told.iterate(loader)

    steps = assert_same(scenario, loader_class)
    assert str(steps).count("out of page-locked memory") >= 2


@pytest.mark.parametrize("persistent", [False, True])
def test_errors_have_their_turn(loader_class, persistent):
    makes = (
        ones,
        PinsBadly,
        large,
        lambda: 1 / 0,
        lambda: ones().to_sparse(),
        lambda: [large(), PinsBadly()],
        ones,
    )

    def build():
        return whole(*makes, num_workers=2, persistent_workers=persistent)

    expected, _ = compare(loader_class, Case(build, epochs=3, take=4))
    assert "in pin memory thread for device 0" in str(expected.outcomes)
    assert "in DataLoader worker process 1" in str(expected.outcomes)


class Slow(Sized):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            time.sleep(1.2)
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [10, 300 << 10])
def test_timeout(loader_class, size):
    """Said in its turn; the next call gets what was late."""

    def scenario(kind, told):
        loader = kind(Slow([size] * 4), num_workers=1, batch_size=None, timeout=0.5, **PIN)
        iterator = told.step("iter", lambda: iter(loader))
        for _ in range(3):
            told.step("next", lambda: next(iterator))
        time.sleep(1.2)
        told.drain(iterator)

    steps = assert_same(scenario, loader_class)
    assert "timed out after 0.5 seconds" in str(steps)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_worker_dies(loader_class, how):
    """The batches from before its death come; then an error, and nothing is left."""
    loader = loader_class(Dies(20, 7, how), num_workers=1, batch_size=None, prefetch_factor=2, **PIN)
    seen = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        for batch in loader:
            assert batch.is_pinned()
            seen.append(int(batch[0]))
    assert seen == list(range(len(seen)))
    assert len(seen) <= 7
    loader = loader_class(Dies(20, 99, how), num_workers=1, batch_size=None, **PIN)
    assert len(list(loader)) == 20


def test_next_in_several_threads(loader_class):
    sizes = [10, 300 << 10] * 30
    iterator = iter(loader_class(Sized(sizes), num_workers=2, batch_size=None, **PIN))
    found: list[torch.Tensor] = []
    lock = threading.Lock()

    def walk() -> None:
        while True:
            with lock:
                batch = next(iterator, None)
            if batch is None:
                return
            found.append(batch)

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(sizes)
    expected = [told(index, size) for index, size in enumerate(sizes)]
    key = lambda tensor: (tensor.numel(), int(tensor[0]), int(tensor[1]))  # noqa: E731
    for one, other in zip(sorted(found, key=key), sorted(expected, key=key), strict=True):
        assert torch.equal(one, other)


# -- Copies to the device that are still under way


@pytest.mark.parametrize("size", [100, 300 << 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_dropped_under_their_copies(loader_class, workers, size):
    """torch's events guard the block that a batch was in, and its slot is not read any more."""
    sizes = [size] * 24
    loader = loader_class(Sized(sizes), num_workers=workers, batch_size=None, **PIN)
    pretend.set_poison(True)
    for _ in range(2):
        copies = []
        pretend.set_delay(20_000)
        for batch in loader:
            copies.append(batch.to(pretend.NAME, non_blocking=True))
            del batch
        pretend.set_delay(0)
        pretend.synchronize()
        for index, copy in enumerate(copies):
            assert torch.equal(copy.cpu(), told(index, size))
    assert pretend.counters()["snapshots"] == 0
