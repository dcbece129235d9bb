"""`device=` where things go wrong half-way, and beside code that knows nothing of it."""

from __future__ import annotations

import collections.abc
import contextlib
import itertools
import os
import traceback

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

import ringloader
from accelerator import pretend
from accelerator.moved import DEVICE, LARGE, Numbered, assert_numbered, bytes_of, loader_on, path
from accelerator.pinned import PIN
from ringloader import DataLoader
from ringloader._features.device import device, device_copy, device_tree
from small_datasets import Made

pytestmark = pytest.mark.rings_only

__all__ = ["path"]


class Sharing(collections.abc.MutableMapping):
    """Copies of it share its items."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class SharingList(collections.abc.MutableSequence):
    def __init__(self, items):
        self._items = list(items)

    def __getitem__(self, at):
        return self._items[at]

    def __setitem__(self, at, value):
        self._items[at] = value

    def __delitem__(self, at):
        del self._items[at]

    def __len__(self):
        return len(self._items)

    def insert(self, at, value):
        self._items.insert(at, value)


class Moves:
    """Moves itself, but for one."""

    def __init__(self, number, error):
        self.number, self.error, self.tensor = number, error, bytes_of(number, 100)

    def to(self, device, non_blocking=False):
        if self.number == 1:
            raise self.error
        self.tensor = self.tensor.to(device, non_blocking=non_blocking)
        return self


class Waits(Moves):
    is_full = False

    def to(self, device, non_blocking=False):
        if self.is_full:
            raise torch.OutOfMemoryError("full")
        return super().to(device, non_blocking)


def drained(iterator):
    """Returns the batches of an iterator, with errors in place of those that it raises."""
    found = []
    while len(found) < 20:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError(f"it does not end: {found}")


@pytest.mark.parametrize("path", ["native", "no workers"], indirect=True)
@pytest.mark.parametrize("fault", ["copy", "allocation"])
def test_what_could_not_be_copied_is_copied_again(path, fault):
    def make(number):
        names = {f"{at}": bytes_of(number + at, size) for at, size in enumerate((100, LARGE, LARGE))}
        return Sharing(names | {"3": SharingList([bytes_of(number, 10)])})

    for nth in (1, 2):
        iterator = iter(loader_on(path, Made(make, 4), device_prefetch=0))
        pretend.fail(fault, nth=nth)
        found = drained(iterator)
        pretend.fail(fault, times=0)
        batches = [batch for batch in found if not isinstance(batch, Exception)]
        # A spare block may have been there.
        assert len(batches) == 4 and len(found) <= 5
        for number, batch in enumerate(batches):
            (last,) = batch.pop("3")
            assert last.device == DEVICE and torch.equal(last.cpu(), bytes_of(number, 10))
            assert {tensor.device for tensor in batch.values()} == {DEVICE}
            assert_numbered(batch, number)


def test_memory_is_that_of_the_device():
    made = torch.arange(6, device=DEVICE)
    packed = pack_sequence([torch.zeros(2), torch.zeros(1)])
    sparse = torch.eye(3).to_sparse()
    batch = [made, torch.ones(2), sparse, packed, {"a": made[2:]}]
    assert [id(one) for one in device_tree.memory_of([batch[0], batch[1]], DEVICE)] == [id(made)]
    assert len(device_tree.memory_of(batch, DEVICE)) == 2
    assert len(device_tree.memory_of(packed, torch.device("cpu"))) == 2


@pytest.mark.parametrize("path", ["native", "no workers"], indirect=True)
def test_what_a_transform_leaves_on_the_cpu_stays_there(path):
    def transform(batch):
        return {"0": batch["0"], "cpu": torch.ones(3), "sparse": torch.eye(3).to_sparse()}

    stream = torch.Stream(device=DEVICE)
    with pretend.on_stream(stream):
        found = list(loader_on(path, Numbered(3, (100,)), device_transform=transform))
        for number, batch in enumerate(found):
            types = [batch[name].device.type for name in ("0", "cpu", "sparse")]
            assert types == [pretend.NAME, "cpu", "cpu"]
            # On this stream, which was the current one at hand-out.
            assert_numbered({"0": batch["0"]}, number)


@pytest.mark.parametrize(
    ("error_type", "without_streams"), [(ValueError, False), (ValueError, True), (StopIteration, False)]
)
def test_an_error_of_a_transform_is_raised_once(path, error_type, without_streams, monkeypatch):
    # One that outlives the test would keep its frames, and the batches in them.
    error = error_type("own")
    if without_streams and path == "native":
        pytest.skip("such a device is moved to in the batch's turn")
    if without_streams:
        monkeypatch.setattr(device, "_WITHOUT_STREAMS", {pretend.NAME})
    calls = []

    def transform(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise error
        return batch

    found = drained(iter(loader_on(path, Numbered(4, (100,)), device_transform=transform)))
    assert len(calls) == len(found) == 4
    raised = found.pop(1)
    if isinstance(error, StopIteration):
        assert type(raised) is RuntimeError and raised.__cause__ is error
    else:
        assert raised is error
    for number, batch in zip((0, 2, 3), found, strict=True):
        assert_numbered(batch, number)


def test_a_transform_on_the_cpu_does_not_end_the_epoch():
    def transform(_):
        raise StopIteration

    with pytest.raises(RuntimeError, match="device_transform raised StopIteration"):
        list(loader_on("no workers", Numbered(4, (100,)), device="cpu", device_transform=transform))


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["plain", "transform"])
@pytest.mark.parametrize("error_type", [RuntimeError, StopIteration])
def test_an_error_of_what_moves_itself_is_raised_once(path, error_type, transform):
    error = error_type("own")

    def make(number):
        return [Moves(number, error), bytes_of(number, 50)]

    found = drained(iter(loader_on(path, Made(make, 4), device_transform=transform)))
    assert len(found) == 4
    raised = found.pop(1)
    assert type(raised) is (RuntimeError if isinstance(error, StopIteration) else type(error))
    for number, (one, other) in zip((0, 2, 3), found, strict=True):
        assert_numbered({"0": one.tensor}, number)
        assert_numbered({"0": other}, number)


def test_out_of_memory_of_what_moves_itself_is_raised_until_there_is_some(path, monkeypatch):
    monkeypatch.setattr(Waits, "is_full", True)
    iterator = iter(loader_on(path, Made(lambda number: [Waits(2 * number, None), bytes_of(number, 9)], 4)))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            next(iterator)
    before = pretend.counters()["copies_to_device"]
    Waits.is_full = False
    for number, (one, other) in enumerate(iterator):
        assert_numbered({"0": one.tensor}, 2 * number)
        assert_numbered({"0": other}, number)
        if number == 0 and path == "native":
            # Copies of batches ahead, and none again for this one.
            assert pretend.counters()["copies_to_device"] - before <= 3
    assert number == 3


def test_what_was_issued_in_its_turn_is_not_issued_again():
    issued = []

    class Issued:
        def result(self):
            issued.append("asked")
            if len(issued) == 2:
                raise torch.OutOfMemoryError("full")
            return 3

    later = device_copy.Later(lambda: issued.append("issued") or Issued())
    with pytest.raises(torch.OutOfMemoryError):
        later.result()
    assert later.result() == 3 and issued == ["issued", "asked", "asked"]


def test_an_interrupted_batch_is_the_next(path):
    calls, error = [], KeyboardInterrupt()

    def transform(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise error
        return batch

    iterator = iter(loader_on(path, Numbered(4, (100,)), device_transform=transform, device_prefetch=0))
    assert_numbered(next(iterator), 0)
    with pytest.raises(type(error)):
        next(iterator)
    assert not getattr(error, "__notes__", ())
    for number in range(1, 4):
        assert_numbered(next(iterator), number)
    assert list(iterator) == []


def nested(_):
    """Does what a dataset may do in a worker. The device of the second is not there."""
    options = {"batch_size": None, "device_transform": None}
    for where in (DEVICE, torch.device(pretend.NAME, 7)):
        (found,) = DataLoader(Numbered(1, (100,)), device=where, **options)
        assert found["0"].device.type == "cpu"
    (found,) = torch.utils.data.DataLoader(Numbered(1, (100,)), batch_size=None)
    return found


@pytest.mark.parametrize("path", ["native", "torch"], indirect=True)
def test_a_loader_in_a_worker_moves_nothing(path):
    def transform(batch):
        assert batch["0"].device == DEVICE
        return batch

    with ringloader.installed(device=DEVICE, device_transform=transform):
        for batch in loader_on(path, Made(nested, 2), device_transform=transform):
            assert_numbered(batch, 0)


@pytest.mark.parametrize("path", ["native", "no workers"], indirect=True)
def test_one_stream_for_all_loaders(path):
    for _ in range(2):
        list(loader_on(path, Numbered(2, (100,))))
    mine = {key: stream for key, stream in device_copy._streams.items() if key[1] == DEVICE}
    assert len(mine) == 1
    assert device_copy.CopyStream(DEVICE).stream is device_copy.CopyStream(DEVICE).stream


@pytest.mark.parametrize("path", ["native", "no workers"], indirect=True)
def test_in_inference_mode_a_transform_has_no_gradients(path):
    weight = torch.ones(100, device=DEVICE, requires_grad=True)
    seen = []

    def transform(batch):
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return batch["0"] * weight

    with torch.inference_mode():
        found = list(loader_on(path, Numbered(2, (100,)), device_transform=transform))
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert seen == [(False, False)] * 2
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in found)
    assert torch.is_grad_enabled()


def test_memory_of_what_a_transform_was_given_is_not_held(monkeypatch):
    seen, found = [], device_copy.Moved.__init__

    def init(self, ahead, copies, data, stream, done, memory, *rest):
        seen.append([tensor.numel() for tensor in memory])
        found(self, ahead, copies, data, stream, done, memory, *rest)

    monkeypatch.setattr(device_copy.Moved, "__init__", init)
    list(loader_on("native", Numbered(3, (LARGE,)), device_transform=lambda batch: batch["0"][:7].clone()))
    assert seen == [[7]] * 3


class Own(DataLoader):
    """Has a device of its own."""

    @property
    def device(self):
        return "its own"

    device_prefetch = "its own"


class Setting(DataLoader):
    def __init__(self, *args, before, **kwargs):
        if before:
            self.device = "its own"
        super().__init__(*args, **kwargs)
        if not before:
            self.device = "its own"


@pytest.mark.parametrize(
    "cls", [Own, lambda *args, **kwargs: Setting(*args, before=kwargs.pop("b"), **kwargs)]
)
@pytest.mark.parametrize("before", [False, True])
def test_a_subclass_has_a_device_of_its_own(cls, before):
    more = {} if cls is Own else {"b": before}
    loader = cls(Numbered(2, (100,)), batch_size=None, device=DEVICE, **more)
    for batch in loader:
        assert batch["0"].device == DEVICE
    ringloader.convert(loader, device_transform=lambda batch: batch["0"])
    for batch in loader:
        assert batch.device == DEVICE
    assert loader.device == "its own"


def make_nested(number):
    """Tensors of rows of several lengths, in torch's strided layout."""
    return torch.nested.nested_tensor([torch.full((2,), float(number)), torch.ones(3)])


def outcomes(batches, number=3):
    """Returns the outcomes of a number of batches: the tensors in each, or the error's type and words."""
    found, iterator = [], iter(batches)
    for _ in range(number):
        try:
            batch = next(iterator)
            found.append([(part.device, part.tolist()) for part in batch.unbind()])
        except Exception as error:
            found.append((type(error), str(error).splitlines()[0]))
    assert next(iterator, None) is None
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_what_torch_makes_of_them(path):
    """The pretend accelerator has no code for them, so that torch raises for each; others have."""

    class Moved:
        """torch's batches, each moved in the loop."""

        def __init__(self):
            self._batches = iter(torch.utils.data.DataLoader(Made(make_nested, 3), batch_size=None))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._batches).to(DEVICE)

    theirs = outcomes(Moved())
    assert len(theirs) == 3
    assert outcomes(loader_on(path, Made(make_nested, 3))) == theirs
    assert outcomes(loader_on(path, Made(make_nested, 3), device_transform=lambda batch: batch)) == theirs


class OfSubclass(torch.Tensor):
    def to(self, *_, **__):
        raise ValueError("own")


def test_an_error_of_a_subclass_of_tensors_is_raised_once(path):
    def make(number):
        made = bytes_of(number, 50)
        return made.as_subclass(OfSubclass) if number == 1 else made

    found = drained(iter(loader_on(path, Made(make, 4))))
    assert [type(one) for one in found] == [torch.Tensor, ValueError, torch.Tensor, torch.Tensor]


class Recorded:
    """Has memory that it takes a note of itself, and cannot for one."""

    def __init__(self, number, tensor):
        self.number, self.tensor = number, tensor

    def record_stream(self, stream):
        if self.number == 1:
            raise KeyError("own")
        self.tensor.record_stream(stream)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_an_objects_record_stream_is_raised_once(path, prefetch):
    numbers = itertools.count()

    def transform(batch):
        return Recorded(next(numbers), batch["0"])

    loader = loader_on(path, Numbered(4, (100,)), device_transform=transform, device_prefetch=prefetch)
    found = drained(iter(loader))
    assert [type(one) for one in found] == [Recorded, KeyError, Recorded, Recorded]
    for number in (0, 2, 3):
        assert_numbered({"0": found[number].tensor}, number)


class Pinning:
    """torch's example of a batch of one's own: pins itself, does not move itself."""

    def __init__(self, number):
        self.tensor, self.by = bytes_of(number, 100), None

    def pin_memory(self):
        if self.by == "fails":
            raise ValueError("own")
        self.tensor, self.by = self.tensor.pin_memory(), "itself"
        return self


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["plain", "transform"])
def test_what_pins_itself_and_does_not_move_itself_is_pinned(path, transform):
    def make(number):
        return Pinning(number), bytes_of(number, 50)

    theirs = [one for one, _ in torch.utils.data.DataLoader(Made(make, 4), batch_size=None, **PIN)]
    for number, (one, other) in enumerate(loader_on(path, Made(make, 4), device_transform=transform)):
        assert (one.by, one.tensor.is_pinned()) == (theirs[number].by, theirs[number].tensor.is_pinned())
        assert one.by == "itself" and torch.equal(one.tensor, bytes_of(number, 100))
        assert_numbered({"0": other}, number)
    assert number == 3


def test_an_error_of_what_pins_itself_is_raised_once(path):
    def make(number):
        made = Pinning(number)
        made.by = "fails" if number == 1 else None
        return [made]

    found = drained(iter(loader_on(path, Made(make, 4))))
    assert [type(one) for one in found] == [list, ValueError, list, list]


def test_a_container_that_pins_itself_is_moved():
    class Batch(dict):
        def pin_memory(self):
            raise AssertionError

    for number, batch in enumerate(loader_on("no workers", Made(lambda n: Batch({"0": bytes_of(n, 9)}), 4))):
        assert type(batch) is Batch and batch["0"].device == DEVICE
        assert_numbered(batch, number)


def in_child(function):
    """The exit status of a forked child that calls a function."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_child_that_cannot_use_the_device_auto_is_the_cpu(workers):
    torch.empty(1, device=DEVICE)
    options = {"batch_size": None, "num_workers": workers}
    before = DataLoader(Numbered(4, (100,)), device="auto", **options)

    def child():
        made = [
            before,
            DataLoader(Numbered(4, (100,)), device="auto", **options),
            torch.utils.data.DataLoader(Numbered(4, (100,)), **options),
        ]
        with ringloader.installed(device="auto"):
            made.append(torch.utils.data.DataLoader(Numbered(4, (100,)), **options))
            found = [list(loader) for loader in made]
        for batches in found:
            assert len(batches) == 4
            for number, batch in enumerate(batches):
                assert batch["0"].device.type == "cpu"
                assert_numbered(batch, number)
        transformed = DataLoader(
            Numbered(4, (100,)), device="auto", device_transform=lambda batch: batch["0"].float(), **options
        )
        assert {(batch.device.type, batch.dtype) for batch in transformed} == {("cpu", torch.float32)}
        # One that is named is torch's error, as of `.to()`.
        with pytest.raises(RuntimeError, match="fork"):
            next(iter(DataLoader(Numbered(4, (100,)), device=DEVICE, **options)))

    assert in_child(child) == 0
    assert {batch["0"].device for batch in before} == {DEVICE}


def modes():
    """Returns the modes that have a say in the caller's next lines."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "device": str(torch.get_default_device()),
    }


MODES = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "device": lambda: torch.device("cpu:0"),
}


def of_iter(name):
    """The modes of a loop in torch, but for inference mode."""
    with MODES[name]():
        found = modes()
    return found | {"inference": False}


@pytest.mark.parametrize("other", MODES)
@pytest.mark.parametrize("name", MODES)
def test_each_transform_has_the_modes_of_iter(path, name, other):
    """However many are prepared in the calls of `next`, each of which has its own."""
    seen = []

    def transform(batch):
        seen.append(modes())
        return batch

    options = {"num_workers": 1, "persistent_workers": True, "device_transform": transform}
    loader = loader_on(path, Numbered(6, (100,)), **options)
    for at_iter in (name, other):
        seen.clear()
        with MODES[at_iter]():
            iterator = iter(loader)
        for number in range(6):
            inside = (name, other)[number % 2]
            with MODES[inside]():
                before = modes()
                batch = next(iterator)
                assert modes() == before
            assert_numbered(batch, number)
        with pytest.raises(StopIteration):
            next(iterator)
        assert seen == [of_iter(at_iter)] * 6


@pytest.mark.parametrize("path", ["native", "no workers"], indirect=True)
def test_casts_of_weights_are_not_kept_for_the_next_batch(path):
    """The casts are forgotten where the transform ends, as torch's autocast does."""
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def transform(batch):
        return torch.ones(2, 2) @ weight, batch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        iterator = iter(loader_on(path, Numbered(3, (100,)), device_transform=transform, device_prefetch=0))
    for number in range(3):
        with torch.no_grad():
            weight.fill_(number)
        product, _ = next(iterator)
        assert (product.dtype, product[0, 0].item()) == (torch.bfloat16, 2 * number)


def moves_with_grad(number):
    return torch.full((3,), float(number), requires_grad=True)


def test_what_is_moved_for_a_transform_has_gradients_as_of_iter():
    loader = loader_on("no workers", Made(moves_with_grad, 4), device_transform=lambda batch: batch)
    iterator, found = iter(loader), []
    for number in range(4):
        with MODES["no_grad" if number % 2 else "none"]():
            found.append(next(iterator).grad_fn is not None)
    assert found == [True] * 4


def test_a_batch_that_is_begun_in_its_turn_is_in_no_mode_of_the_caller():
    """A batch that is begun ahead is in no mode of the caller either."""
    iterator = iter(loader_on("native", Numbered(4, (100,)), device_prefetch=0))
    pretend.fail("allocation", times=1)
    with FakeTensorMode():
        first = next(iterator)
    pretend.fail("allocation", times=0)
    assert type(first["0"]) is torch.Tensor
    assert_numbered(first, 0)
