"""`device=`: small tensors cross together, and each is an ordinary tensor of the device's allocator."""

from __future__ import annotations

import gc
import time
import warnings

import pytest
import torch

import ringloader
from accelerator import pretend
from accelerator.moved import (
    DEVICE,
    LATE_US,
    Numbered,
    assert_numbered,
    bytes_of,
    loader_on,
    path,
)
from ringloader._features.device import device_copy, device_tree
from ringloader._torch import devices
from small_datasets import Made

pytestmark = pytest.mark.rings_only

__all__ = ["path"]

# Words and bytes, in an order in which each has neighbours of both kinds; as much as fills several lines.
SIZES = (64, 100, 512, 8, 1, 1000, 4096, 33, 256)
# A small tensor between others, as bytes.
NUMBER = 2
MORE = 6000
# Bytes of the block in which they cross.
BLOCK = sum(-(-size // 32) * 32 for size in SIZES)


def new(size=MORE):
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def resize_of_storage(tensor):
    tensor.untyped_storage().resize_(MORE)
    tensor.set_(tensor.untyped_storage(), 0, (MORE,), (1,))


def out_of_sum(tensor):
    torch.add(new().fill_(3), new().fill_(4), out=tensor)


def out_of_cat(tensor):
    torch.cat([new(MORE // 2).fill_(3)] * 2, out=tensor)


def out_of_selection(tensor):
    torch.index_select(new(10).fill_(3), 0, torch.zeros(MORE, dtype=torch.int64, device=DEVICE), out=tensor)


GROW = {
    "resize_": lambda tensor: tensor.resize_(MORE),
    "resize_ of data": lambda tensor: tensor.data.resize_(MORE),
    "resize_ of a view": lambda tensor: tensor[10:].resize_(MORE).fill_(3),
    "resize_ to channels last": lambda tensor: tensor.resize_(
        10, 10, 6, 10, memory_format=torch.channels_last
    ),
    "resize_as_": lambda tensor: tensor.resize_as_(new()),
    "resize_ of the storage": resize_of_storage,
    "set_": lambda tensor: tensor.set_(tensor.untyped_storage(), 0, (MORE,), (1,)),
    "out= of a sum": out_of_sum,
    "out= of cat": out_of_cat,
    "out= of index_select": out_of_selection,
}


def enlarged(tensor, way):
    """Makes a tensor larger, and writes all over it. Returns what it was before that, and its form."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="An output with one or more elements was resized")
        GROW[way](tensor)
    # In the order of memory: elsewhere nothing was written yet.
    kept = tensor.as_strided((64,), (1,)).cpu()
    form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    whole.set_(tensor.untyped_storage(), 0, (form[-1],), (1,)).fill_(0xEE)
    return kept, form


def check_neighbours(batches, way):
    """Enlarges one tensor in each batch: all others, of this batch and of the next ones, stay as they are."""
    for number, batch in enumerate(batches):
        # torch's, with the bytes that this one should have.
        theirs = bytes_of(number + NUMBER, SIZES[NUMBER]).to(DEVICE)
        (kept, form), (their_kept, their_form) = (
            enlarged(tensor, way) for tensor in (batch.pop(f"{NUMBER}"), theirs)
        )
        assert form == their_form
        assert torch.equal(kept, their_kept)
        assert_numbered(batch, number)


@pytest.mark.parametrize("way", GROW)
def test_what_makes_a_small_tensor_larger_leaves_its_neighbours(path, way):
    loader = loader_on(path, Numbered(3, SIZES))
    check_neighbours(list(loader), way)
    assert pretend.violations() == []


def in_one_storage(number):
    """The tensors of a batch over one storage."""
    block = torch.cat([bytes_of(number + at, size) for at, size in enumerate(SIZES)]).to(DEVICE)
    return {
        f"{at}": torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(
            block.untyped_storage(), sum(SIZES[:at]), (size,), (1,)
        )
        for at, size in enumerate(SIZES)
    }


@pytest.mark.parametrize("way", GROW)
def test_in_one_storage_these_ways_would_be_found(way):
    with pytest.raises(AssertionError):
        check_neighbours([in_one_storage(0)], way)


def test_nothing_leads_to_a_neighbour(path):
    """A storage ends with its tensor, so that torch refuses a longer view."""
    for batch in loader_on(path, Numbered(2, SIZES)):
        for tensor in batch.values():
            with pytest.raises(RuntimeError, match="out of bounds"):
                tensor.as_strided((tensor.numel() + 1,), (1,))


def test_a_saved_tensor_is_no_larger_than_itself(path, tmp_path):
    batch = next(iter(loader_on(path, Numbered(1, (4096,) * 40))))
    torch.save(batch["3"], tmp_path / "label.pt")
    assert (tmp_path / "label.pt").stat().st_size < 8192


FORMS = {
    "plain": lambda number: [torch.arange(size) + number for size in (7, 30, 200)],
    "scalars": lambda number: [torch.tensor(one) for one in (number * 1.5, number > 0, [], number + 1j)],
    "empty": lambda _: [torch.empty(0), torch.empty(3, 0, dtype=torch.int8), torch.empty(0, 4)[:, ::2]],
    "empty among others": lambda number: [torch.full(size, number) for size in ((9,), (0, 5), (3, 3), (8,))],
    "transposed": lambda number: [torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1) + number] * 4,
    "of step 0": lambda number: [torch.tensor([[number]]).expand(3, at) for at in (2, 4, 8)],
    "gaps": lambda number: [torch.full((6, 10), number)[:, at : at + 3] for at in range(4)],
    "views of one": lambda number: list(torch.arange(100).add(number).view(torch.uint8).split(80)),
    "float8": lambda number: [torch.full((5,), number).to(torch.float8_e4m3fn)] * 3,
    "unsigned": lambda number: [torch.full((5,), number, dtype=torch.uint16)] * 3,
    "conjugates": lambda number: [torch.full((5,), complex(number, 2)), torch.full((5,), 1j).conj()] * 2,
    "negative": lambda number: [torch.full((5,), complex(number, 2)).conj().imag] * 3,
    "gradients": lambda number: [torch.full((5,), float(number), requires_grad=True)] * 3,
    "more than a block": lambda number: [bytes_of(number + at, 60 << 10) for at in range(40)],
    "large ones too": lambda number: [bytes_of(number + size, size) for size in (9, 16, 1, 99_999)],
}


def form_of(tensor):
    return {
        "device": tensor.device,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "strides": tensor.stride(),
        "offset": tensor.storage_offset(),
        "bytes of the storage": tensor.untyped_storage().nbytes(),
        "is_contiguous": tensor.is_contiguous(),
        "version": tensor._version,
        "is a view": tensor._is_view(),
        "requires_grad": (tensor.requires_grad, tensor.is_leaf),
        "bits": (tensor.is_conj(), tensor.is_neg()),
    }


def bits_of(tensor):
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).tolist() if plain.numel() else []


@pytest.fixture(params=["together", "one by one"])
def how(request, monkeypatch):
    """The device has code that copies many tensors at once, or has none."""
    devices.copies_many.cache_clear()
    assert devices.copies_many(pretend.NAME)
    if request.param == "one by one":
        monkeypatch.setattr(devices, "copies_many", lambda _: False)
    return request.param


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("kind", FORMS)
def test_tensors_are_torchs(path, kind):
    if kind in ("gradients", "conjugates", "negative") and path != "no workers":
        pytest.skip("torch cannot send them, or forgets of them what they are")
    theirs = [[tensor.to(DEVICE, non_blocking=True) for tensor in FORMS[kind](number)] for number in range(2)]
    with pretend.delayed(2000):
        found = list(loader_on(path, Made(FORMS[kind], 2)))
    for ours, expected in zip(found, theirs, strict=True):
        assert [form_of(tensor) for tensor in ours] == [form_of(tensor) for tensor in expected]
        assert [bits_of(tensor) for tensor in ours] == [bits_of(tensor) for tensor in expected]
        assert len({tensor.untyped_storage()._cdata for tensor in ours}) == len(ours)
    assert pretend.violations() == []


def copies_of_one(path, sizes):
    """Returns copies to the device, copies on it, and new memory of it for one batch; and the batch."""
    iterator = iter(loader_on(path, Numbered(3, sizes), device_prefetch=0))
    next(iterator)
    gc.collect()
    before = pretend.counters()
    batch = next(iterator)
    after = pretend.counters()
    names = ("copies_to_device", "copies_on_device", "device_allocations")
    assert after["snapshots"] == before["snapshots"]
    return [after[name] - before[name] for name in names], batch


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # One tensor or two: no fewer calls if they crossed together.
        ((100,), [1, 0, 1]),
        ((100, 64), [2, 0, 2]),
        # Words, or bytes.
        ((64, 128, 8), [1, 1, 4]),
        ((1, 2, 3), [1, 1, 4]),
        (SIZES, [1, 2, len(SIZES) + 1]),
        ((1024,) * 40, [1, 1, 41]),
        # 16 in a block.
        ((64 << 10,) * 33, [3, 2, 35]),
    ],
)
def test_calls_of_the_device(path, sizes, expected):
    found, batch = copies_of_one(path, sizes)
    assert found == expected
    assert_numbered(batch, 1)


def test_without_code_for_many_each_is_copied(path, monkeypatch):
    """No more calls than torch's."""
    monkeypatch.setattr(devices, "copies_many", lambda _: False)
    found, batch = copies_of_one(path, SIZES)
    assert found == [len(SIZES), 0, len(SIZES)]
    assert_numbered(batch, 1)


def memory(call):
    """The result of a call, and the device's blocks and bytes that are in use for it."""
    gc.collect()
    pretend.synchronize()
    before = pretend.counters()
    result = call()
    pretend.synchronize()
    after = pretend.counters()
    return result, [after[name] - before[name] for name in ("device_blocks", "device_bytes")]


def test_memory_in_use_is_torchs(path):
    """That of the tensors, each of which gives its own back."""
    iterator = iter(loader_on(path, Numbered(3, SIZES), device_prefetch=0))
    next(iterator)
    batch, ours = memory(lambda: next(iterator))
    same, theirs = memory(
        lambda: {f"{at}": bytes_of(1 + at, size).to(DEVICE) for at, size in enumerate(SIZES)}
    )
    assert ours == theirs
    for name in list(same):
        (_, given), (_, expected) = (
            memory(lambda one=one, name=name: one.__delitem__(name)) for one in (batch, same)
        )
        assert given == expected and given[0] == -1


@pytest.mark.skipif(not hasattr(torch.accelerator, "memory_allocated"), reason="a newer torch tells")
def test_torch_counts_the_memory():
    iterator = iter(loader_on("native", Numbered(3, SIZES), device_prefetch=0))
    next(iterator)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    batch = next(iterator)
    whole = torch.accelerator.memory_allocated() - before
    assert whole == sum(-(-size // 512) * 512 for size in SIZES)
    del batch["6"]
    assert torch.accelerator.memory_allocated() - before == whole - 4096


@pytest.mark.parametrize("recorded", [True, False])
def test_a_stream_that_still_reads_delays_the_reuse(path, recorded):
    # A real device is not late when it is asked to: this skips there.
    pretend.counters()
    pretend.set_poison(True)
    iterator = iter(loader_on(path, Numbered(2, SIZES), device_prefetch=0))
    batch = next(iterator)
    tensor = batch.pop("5")
    address, copied, side = tensor.data_ptr(), new(1000), torch.Stream(device=DEVICE)
    pretend.synchronize()
    with pretend.on_stream(side), pretend.delayed(LATE_US):
        copied.copy_(tensor, non_blocking=True)
    if recorded:
        tensor.record_stream(side)
    # The others are kept: its memory is its own.
    del tensor
    successor = new(1000)
    assert (successor.data_ptr() != address) == recorded
    successor.copy_(torch.full((1000,), 7, dtype=torch.uint8).pin_memory(), non_blocking=True)
    pretend.synchronize()
    assert torch.equal(copied.cpu(), bytes_of(5, 1000)) == recorded
    assert_numbered(batch, 0)
    assert pretend.violations() == []


def late_batches_beside(stream):
    """The copies of a batch, and those that take it apart, happen one by one while a stream gets memory."""
    pretend.set_poison(True)
    iterator = iter(loader_on("native", Numbered(4, SIZES), device_prefetch=0))
    for number in range(4):
        with pretend.delayed(50_000):
            batch = next(iterator)
        # Between the two.
        time.sleep(0.075)
        with pretend.on_stream(stream):
            new(BLOCK).fill_(0x11)
        assert_numbered(batch, number)
    assert pretend.violations() == []


def test_the_block_is_not_used_again_under_the_copies_out_of_it():
    for stream in (
        torch.accelerator.current_stream(),
        torch.Stream(device=DEVICE),
        device_copy.stream_on(DEVICE),
    ):
        late_batches_beside(stream)


def test_a_block_of_another_stream_would_be_found(monkeypatch):
    # A real device is not late when it is asked to: this skips there.
    pretend.counters()
    other = torch.Stream(device=DEVICE)

    def new_block(block):
        with pretend.on_stream(other):
            return new(block.nbytes)

    monkeypatch.setattr(device_tree.Block, "_new_block", new_block)
    with pytest.raises(AssertionError, match="wrong bytes"):
        late_batches_beside(other)


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA")
def test_cuda_copies_many():
    assert devices.copies_many("cuda")


def test_counters_tell_the_copies():
    iterator = iter(loader_on("native", Numbered(4, SIZES)))
    list(iterator)
    told = ringloader.report(iterator).counters
    assert told["device_copies"] == told["device_batches"] == 4
