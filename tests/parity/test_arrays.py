"""Datasets that are arrays: each batch is torch's, and where it can be, one gather of rows makes it."""

from __future__ import annotations

import os
import re
import traceback

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset, default_collate

import ringloader
from parity.arrays import DTYPES, RANDOM, ROWS, case, count_gathered, floats, noise
from parity.harness import Case, compare
from ringloader import ArrayDataset, DataLoader


@pytest.fixture
def made(monkeypatch):
    return count_gathered(monkeypatch)


def signalling():
    bits = np.full((ROWS, 2), 0x7F800001, np.uint32)
    bits[:, 1] = 0xFFA00000 + np.arange(ROWS)
    return bits.view(np.float32)


def unaligned():
    return np.frombuffer(bytearray(RANDOM.bytes(1 + ROWS * 12)), np.uint8)[1:].view("f4").reshape(ROWS, 3)


def ended(array, ones):
    """With a dimension of size 1 whose stride torch refuses."""
    strides = (*array.strides, ones)
    return np.lib.stride_tricks.as_strided(array, (*array.shape, 1), strides)


# One gather makes their batches.
GATHERED = {
    **{f"rows of {code}": noise(code, 2, 3) for code in DTYPES},
    **{f"elements of {code}": noise(code) for code in "?bBhilqfd"},
    "signalling": signalling(),
    "signalling elements": signalling()[:, 0],
    "columns": np.asfortranarray(noise("f", 3))[:, 1],
    "every other": np.arange(4.0 * ROWS).reshape(2 * ROWS, 2)[::2],
    "backwards": noise("i", 3)[::-1],
    "rows of one": noise("f", 1),
    "rows of one by one by two": noise("f", 1, 1, 2),
    "a subset": noise("h", 5, 3)[:, 2:4],
    "read-only elements": np.broadcast_to(np.float32(2.5), ROWS),
    "bytes of an odd number": noise("B", 5),
    "tensor": floats(4),
    "tensor of one dimension": floats(),
    "tensor of images": floats(3, 4, 5),
    "tensor of one channel": floats(1, 4, 5),
    "tensor, strided": floats(4, 2)[:, 1],
    "tensor, expanded": torch.arange(3).expand(ROWS, 3),
    "tensor, bfloat16": floats(3).bfloat16(),
    "tensor, bool": floats(3) > 4,
    "tensor, uint16": floats(3).to(torch.uint16),
    "tensor, complex": torch.complex(floats(2), -floats(2)),
    "tensors": TensorDataset(floats(3), torch.arange(ROWS)),
    "one of tensors": TensorDataset(floats(3)),
    "array": ArrayDataset(noise("B", 3, 2)),
    "arrays": ArrayDataset(noise("B", 3), torch.arange(ROWS), floats(2)),
    "named": ArrayDataset(b=noise("B", 3), a=torch.arange(ROWS)),
    "both": ArrayDataset(noise("B", 3), label=torch.arange(ROWS), weight=noise("d")),
    "with lists": ArrayDataset(
        list("abcdefg"), noise("B", 3), [0.1 * row for row in range(ROWS)], c=list("hijklmn")
    ),
    "named with lists": ArrayDataset(b=list(range(ROWS)), a=floats(2), c=[(row, "x") for row in range(ROWS)]),
    "with what cannot be gathered": ArrayDataset(
        noise("H"), floats(2), x=floats(3).requires_grad_().detach()
    ),
}


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * row for row in super().__getitem__(index))


class OwnArray(np.ndarray):
    def __getitem__(self, index):
        return 3 * np.asarray(super().__getitem__(index))


class OwnTensor(torch.Tensor):
    pass


class OwnArrays(ArrayDataset):
    def __getitem__(self, index):
        return {"row": super().__getitem__(index)}


# Datasets in which nothing but tensors can be gathered.
OF_TENSORS = {name for name in GATHERED if name.startswith(("tensor", "one of tensors"))} | {
    "named with lists",
    "with what cannot be gathered",
}
# An older torch cannot say where a tensor lies without making an object for it: rows of tensors are torch's.
GATHERS_TENSORS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def takes_bools():
    """True if torch makes a tensor of numpy's bools."""
    try:
        torch.as_tensor([np.True_])
    except TypeError:
        return False
    return True


# torch makes these row by row.
NOT_GATHERED = {
    **{f"elements of {code}": noise(code) for code in "HILQeFDg"},
    "rows of g": noise("g", 3),
    "rows of Q": noise("Q", 3),
    "byte-swapped": noise("f", 3).view(">f4"),
    "byte-swapped elements": noise("f").view(">f4"),
    "text": np.array(list("abcdefg")),
    "rows of text": np.array(list("abcdefg")).reshape(ROWS, 1),
    "objects": np.array([1, 2.0, "x", None, [], 3, 4], object),
    "structured": noise([("x", "i4"), ("y", "f4")]),
    "times": noise("h").astype("M8[s]"),
    "no elements": noise("f", 0),
    "rows of columns": np.asfortranarray(noise("f", 3, 2)),
    "rows backwards": noise("f", 3)[:, ::-1],
    "a stride that torch refuses": ended(noise("f", 3), 3),
    "unaligned": unaligned(),
    "no dimension": np.float32(1) + np.zeros(()),
    "tensor without elements": floats(0),
    "tensor of columns": floats(3, 2).transpose(1, 2),
    "tensor, channels last": floats(3, 4, 5).contiguous(memory_format=torch.channels_last),
    "tensor that requires grad": floats(3).requires_grad_(),
    "conjugate": torch.complex(floats(2), floats(2)).conj(),
    "negative": torch.complex(floats(2), floats(2)).conj().imag,
    "sparse": floats(3).to_sparse(),
    "tensors of which one requires grad": TensorDataset(floats(3), floats(3).requires_grad_()),
    "tensors of a class of its own": Doubled(floats(3)),
    "array of a class of its own": noise("B", 3).view(OwnArray),
    "tensor of a class of its own": floats(3).as_subclass(OwnTensor),
    "arrays of a class of its own": OwnArrays(noise("B", 3)),
    "lists alone": ArrayDataset(list(range(ROWS)), name=list("abcdefg")),
}


# In a worker the memory is another, and the rest is the same: one of each sort.
WITH_WORKERS = {
    *(
        "rows of B",
        "rows of e",
        "elements of l",
        "signalling elements",
        "backwards",
        "tensor",
        "tensor of one dimension",
    ),
    *(
        "tensor, expanded",
        "tensors",
        "both",
        "with lists",
        "named with lists",
        "with what cannot be gathered",
    ),
    *(
        "elements of Q",
        "byte-swapped",
        "text",
        "structured",
        "a stride that torch refuses",
        "tensor, channels last",
    ),
    *("tensor that requires grad", "tensors of a class of its own", "lists alone"),
}


def cases(datasets):
    return [(name, workers) for name in datasets for workers in (0, 1) if not workers or name in WITH_WORKERS]


def test_the_names_of_cases_with_workers_are_there():
    assert {name for name, workers in [*cases(GATHERED), *cases(NOT_GATHERED)] if workers} == WITH_WORKERS


@pytest.mark.parametrize(("name", "workers"), cases(GATHERED))
def test_one_gather_makes_what_torch_makes_row_by_row(loader_class, made, name, workers):
    if name == "elements of ?" and not takes_bools():
        pytest.skip("an older torch beside a newer numpy: the next test")
    expected, _ = compare(loader_class, case(GATHERED[name], workers, shuffle=True))
    assert len(expected.delivered()) == (3 if workers else 6)
    if loader_class is DataLoader:
        is_gathered = GATHERS_TENSORS or name not in OF_TENSORS
        assert made[not is_gathered] > 0 and made[is_gathered] == 0


def test_bools_of_numpy_are_a_batch_where_torch_has_an_error(made):
    """numpy 2.3 took from its bools what torch, before it knew that, asked them for."""
    bools = noise("?")
    assert torch.equal(torch.cat(list(DataLoader(bools, batch_size=3))), torch.from_numpy(bools))
    assert list(made) == [3, 0]
    if not takes_bools():
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            list(torch.utils.data.DataLoader(bools, batch_size=3))


@pytest.mark.parametrize(("name", "workers"), cases(NOT_GATHERED))
def test_what_no_gather_makes_is_torchs(loader_class, made, name, workers):
    compare(loader_class, case(NOT_GATHERED[name], workers))
    assert made[0] == 0


def test_rows_of_another_length_than_told_are_torchs_error(loader_class):
    dataset = TensorDataset(floats(3))
    dataset.tensors = (floats(3), floats(2)[:4])
    expected, _ = compare(loader_class, case(dataset, 0))
    assert "IndexError" in str(expected.outcomes)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_may_not_be_written_to_are_torchs_once(loader_class, made, workers):
    rows = noise("f", 3)
    rows.flags.writeable = False
    compare(loader_class, case(rows, workers))
    if loader_class is DataLoader:
        # The first batch of each epoch, of which torch may have something to say. Workers go two paths.
        assert made[1] > 0 and made[0] == 2 * made[1]


def test_torch_is_asked_each_time_where_it_always_warns(made):
    rows = noise("f", 3)
    rows.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="not writable") as said:
            list(DataLoader(rows, batch_size=3))
    finally:
        torch.set_warn_always(False)
    assert len(said) == ROWS
    assert list(made) == [0, 3]


INDICES = {
    "a tuple": (0, 6, 3),
    "negative": [-1, -ROWS, 2],
    "one behind the other": [1, 2, 3],
    "around the end": [-2, -1, 0, 1],
    "the same again": [4, 4, 4],
    "too large": [0, ROWS],
    "too small": [0, -ROWS - 1],
    "very large": [0, 1 << 70],
    "none": [],
    "bools": [True, False],
    "a tensor": torch.tensor([0, 5]),
    "tensors": [torch.tensor(0), torch.tensor(5)],
    "numpy's": [np.int64(3), np.int64(1)],
    "slices": [slice(0, 2), slice(2, 4)],
    "text": ["a"],
    "None": [None, None],
}
SOURCES = {
    "array": noise("f", 3),
    "elements": noise("i"),
    "tensor": floats(2),
    "tensors": TensorDataset(floats(2), torch.arange(ROWS)),
    "arrays": ArrayDataset(floats(2), label=list("abcdefg")),
}


@pytest.mark.parametrize(
    ("source", "workers"), [*((name, 0) for name in SOURCES), ("elements", 1), ("arrays", 1)]
)
def test_indices_mean_what_they_mean_to_torch(loader_class, source, workers):
    def build():
        # The last one shows that what failed before changes nothing.
        batches = [*INDICES.values(), [1, 0]]
        return {"dataset": SOURCES[source], "batch_sampler": batches, "num_workers": workers}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) >= 8


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": None}, {"collate_fn": list}, {"collate_fn": lambda rows: default_collate(rows)}],
    ids=["no batches", "lists", "a function around it"],
)
@pytest.mark.parametrize(("source", "workers"), [*((name, 0) for name in SOURCES), ("arrays", 1)])
def test_what_torch_does_not_collate_is_not_gathered(loader_class, made, source, arguments, workers):
    expected, _ = compare(loader_class, case(SOURCES[source], workers, **arguments))
    assert expected.delivered()
    assert list(made) == [0, 0]


class Words:
    """A sequence whose code is a user's."""

    def __init__(self, asked):
        self.asked = asked

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        self.asked.append(row)
        if row == 4:
            raise LookupError("no word for row 4")
        return "word"


@pytest.mark.parametrize("workers", [0, 1])
def test_frames_of_the_error_of_a_sequence_of_ones_own(workers):
    def run(cls):
        asked = []
        dataset = ArrayDataset(noise("f", 2), Words(asked))
        iterator = iter(cls(dataset, batch_size=3, num_workers=workers))
        assert list(next(iterator)[1]) == ["word"] * 3
        with pytest.raises(LookupError) as raised:
            next(iterator)
        assert list(next(iterator)[1]) == ["word"]
        told = str(raised.value) + "".join(traceback.format_tb(raised.tb))
        return asked, told, str(raised.value).strip().splitlines()[-1]

    (asked, told, last), (torch_asked, torch_told, torch_last) = map(
        run, (DataLoader, torch.utils.data.DataLoader)
    )
    assert (asked, last) == (torch_asked, torch_last)
    for text in (told, torch_told):
        assert re.search(r"test_arrays.py.*in __getitem__\n +raise LookupError", text)
    assert "array_dataset.py" in torch_told and "arrays/__init__.py" not in torch_told
    assert "array_dataset.py" not in told and "arrays/__init__.py" in told


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [lambda: noise("B", 4096), lambda: floats(4096), lambda: noise("q")])
def test_a_batch_and_the_array_are_apart(make, workers):
    rows = make()
    before = torch.as_tensor(rows).clone()
    for batches in (DataLoader(rows, batch_size=3, num_workers=workers) for _ in range(2)):
        kept = []
        for number, batch in enumerate(batches):
            kept.append((batch, before[3 * number : 3 * number + 3]))
            assert torch.equal(*kept[-1])
            batch.fill_(1)
        assert all((batch == 1).all() for batch, _ in kept)
        assert torch.equal(torch.as_tensor(rows), before)


def test_what_is_written_later_is_in_later_batches():
    rows = floats(3).share_memory_()
    iterator = iter(DataLoader(rows, batch_size=3))
    first = next(iterator)
    rows.fill_(-1)
    assert (next(iterator) == -1).all() and (first >= 0).all()


def test_rows_that_moved_are_found_again():
    dataset = TensorDataset(floats(3))
    iterator = iter(DataLoader(dataset, batch_size=3))
    next(iterator)
    dataset.tensors = (floats(2) + 100,)
    assert torch.equal(next(iterator)[0], floats(2)[3:6] + 100)
    # Memory that the tensor no longer has.
    dataset.tensors[0].set_(floats(1).untyped_storage(), 0, (ROWS, 1), (1, 1))
    assert torch.equal(next(iterator)[0], floats(1)[6:])


@pytest.mark.parametrize("left", [4 * ROWS, 4 * (3 * ROWS - 1)])
def test_rows_that_a_resized_storage_lacks_are_torchs_error(loader_class, left):
    rows = floats(3)
    rows.untyped_storage().resize_(left)
    compare(loader_class, case(TensorDataset(rows), 0))


def test_rows_past_a_resized_storage_are_not_read():
    # So many that the memory behind the storage is not mapped.
    rows = torch.zeros(ROWS, 1 << 22)
    rows.untyped_storage().resize_(4 << 22)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        list(DataLoader(TensorDataset(rows), batch_size=ROWS))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_any_start_method_gather(start):
    rows, labels = noise("B", 3), torch.arange(ROWS)
    dataset = ArrayDataset(rows, label=labels)
    loader = DataLoader(
        dataset, batch_size=3, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    for _ in range(2):
        images, named = zip(*loader, strict=True)
        assert torch.equal(torch.cat(images), torch.from_numpy(rows))
        assert torch.equal(torch.cat([batch["label"] for batch in named]), labels)
    del loader


@pytest.mark.rings_only
@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_own_class_gathers_where_ringloader_is_installed(made, workers):
    loader = torch.utils.data.DataLoader(floats(3).numpy(), batch_size=3, num_workers=workers)
    with ringloader.installed():
        batches = list(loader)
    assert torch.equal(torch.cat(batches), floats(3)) and list(made) == [3, 0]
    assert torch.equal(torch.cat(list(ringloader.convert(loader))), floats(3)) and list(made) == [6, 0]


@pytest.mark.rings_only
@pytest.mark.parametrize("workers", [0, 1])
def test_what_comes_after_the_fetcher_gets_what_was_gathered(made, workers):
    # Without an accelerator `auto` is the CPU, and the transform runs there.
    loader = DataLoader(
        ArrayDataset(floats(3).numpy(), floats(3)),
        batch_size=3,
        num_workers=workers,
        device="auto",
        device_transform=lambda batch: 2 * batch[0].cpu(),
    )
    assert torch.equal(torch.cat(list(loader)), 2 * floats(3))
    assert list(made) == [3, 0]


@pytest.mark.rings_only
def test_rows_that_are_not_in_memory_are_read(tmp_path, made):
    path = tmp_path / "rows.bin"
    whole = np.random.default_rng(1).integers(0, 256, (512, 20_000), np.uint8)
    with path.open("wb") as file:
        file.write(whole.tobytes())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rows = np.memmap(path, np.uint8, "r+", shape=whole.shape)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2)).tolist()
    loader = DataLoader(rows, batch_size=64, sampler=order)
    assert torch.equal(torch.cat(list(loader)), torch.from_numpy(whole[order]))
    assert made[1] == 0
