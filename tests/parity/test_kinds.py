"""Any object may be a batch: it arrives as it arrives with torch."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from faults.script import run_script
from parity import harness
from parity.batch_values import ALL, quiet
from parity.datasets import identity
from parity.describe import describe, tensor_bytes
from parity.harness import Case, compare, run
from small_datasets import Made


class Kinds(Dataset):
    """Each value alone, twice in a list, beside a label, and beside another one of its kind."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 4 * len(self.names)

    def __getitem__(self, index):
        make = ALL[self.names[index // 4]]
        value = make()
        if index % 4 == 0:
            return value
        if index % 4 == 1:
            return [value, value]
        if index % 4 == 2:
            return {"value": value, "label": torch.tensor(3)}
        return (value, make())


# Some kinds for each worker: most of a test's time is the worker's start.
TOGETHER = [list(ALL)[first : first + 8] for first in range(0, len(ALL), 8)]


@pytest.mark.parametrize("names", TOGETHER, ids=" | ".join)
def test_kinds(loader_class, names):
    def build():
        return {"dataset": Kinds(names), "batch_size": None, "num_workers": 1, "collate_fn": identity}

    expected, _ = compare(loader_class, Case(build))
    # Torch itself cannot send some of them; then the error is the same. Beside batches: the loader, `iter`,
    # and the end, twice.
    assert len(expected.steps) == 4 * len(names) + 4


WRONG_IN_TORCH = {
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conjugate large": lambda: torch.full((4000,), 1 + 2j).conj(),
    "negative bit": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negative bit large": lambda: torch.full((4000,), 1 + 2j).conj().imag,
    "conjugate and negative": lambda: torch._neg_view(torch.tensor([1 + 2j]).conj()),
    "in a list": lambda: [torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()],
    "alias": lambda: (lambda x: [x, x.conj(), x.conj().imag])(torch.tensor([1 + 2j, 5j])),
    "dict": lambda: {"a": torch.tensor([1 + 2j]).conj().imag, "b": 3},
    # Arrives without its quantizer with torch.
    "quantized": lambda: quiet(lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)),
}


class Views(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return WRONG_IN_TORCH[self.name]()


def values(batch):
    if isinstance(batch, torch.Tensor) and batch.is_quantized:
        return describe(batch)
    if isinstance(batch, torch.Tensor):
        return (batch.dtype, batch.shape, tensor_bytes(batch))
    items = batch.values() if isinstance(batch, dict) else batch
    return [values(item) if isinstance(item, torch.Tensor) else item for item in items]


@pytest.mark.rings_only
@pytest.mark.parametrize("name", WRONG_IN_TORCH)
def test_lazy_views_have_the_right_values(loader_class, name):
    """Torch's workers drop the conjugate and negative bits: the reference is torch without workers."""

    def build(workers):
        return {"dataset": Views(name), "batch_size": None, "num_workers": workers, "collate_fn": identity}

    reference = run(torch.utils.data.DataLoader, Case(lambda: build(0), keep=True))
    actual = run(loader_class, Case(lambda: build(1), keep=True))
    assert [values(batch) for batch in actual.batches] == [values(batch) for batch in reference.batches]


class Unresolved(TorchFunctionMode):
    """Leaves the bits of lazy views as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in ("resolve_conj", "resolve_neg"):
            return args[0]
        return function(*args, **(kwargs or {}))


def unresolved(batch):
    Unresolved().__enter__()
    return batch


@pytest.mark.rings_only
def test_a_mode_that_resolves_no_view_does_not_end_the_worker(loader_class):
    loader = loader_class(Views("conjugate"), batch_size=None, num_workers=1, collate_fn=unresolved)
    assert [batch.shape for batch in loader] == [(2,), (2,)]


class Unsendable(Dataset):
    """Sample 1 cannot be pickled."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.make() if index == 1 else {"index": torch.tensor(index)}


def open_file():
    return open(__file__)  # noqa: PTH123


UNSENDABLE = {
    "generator": lambda: (number for number in range(3)),
    "open file": open_file,
    "lambda": lambda: lambda: None,
    "local class": lambda: type("Local", (), {})(),
    "module": lambda: sys,
    "among tensors": lambda: {"t": torch.arange(4000), "f": lambda: None},
    "inside an object": lambda: [1, {"deep": [torch.arange(3), open_file()]}],
    "no leaf": lambda: torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.rings_only
@pytest.mark.limit(120)
@pytest.mark.parametrize("name", UNSENDABLE)
def test_unsendable_batch_is_an_error_and_no_hang(loader_class, name):
    """With torch the batch is lost in the feeder thread and the parent waits forever."""

    def build():
        dataset = Unsendable(UNSENDABLE[name])
        return {"dataset": dataset, "batch_size": None, "num_workers": 1, "collate_fn": identity}

    record = run(loader_class, Case(build))
    kinds = [step.outcome[0] for step in record.steps if step.call == "next"]
    assert kinds == ["batch", "error", "batch", "batch", "stop", "stop"]
    error = next(step.outcome for step in record.steps if step.outcome[0] == "error")
    assert "worker process 0" in error[2]


class FailsToUnpickle:
    def __reduce__(self):
        return (int, ("not a number",))


def arrives_broken(index):
    return FailsToUnpickle() if index == 1 else index


def test_batch_that_fails_to_unpickle(loader_class):
    """The error of the constructor comes out of `next`, whichever loader."""
    record = run(
        loader_class,
        Case(
            lambda: {
                "dataset": Made(arrives_broken, 3),
                "batch_size": None,
                "num_workers": 1,
                "collate_fn": identity,
            },
            # torch has lost the batch and would wait for it without end in the next step.
            max_steps=4,
        ),
    )
    errors = [step.outcome for step in record.steps if step.outcome[0] == "error"]
    assert errors, record.outcomes
    assert "not a number" in errors[0][2]


@pytest.mark.rings_only
@pytest.mark.limit(120)
@pytest.mark.parametrize("path", harness.PATHS)
def test_iteration_goes_on_after_a_batch_that_fails_to_unpickle(loader_class, path):
    def build():
        return {
            "dataset": Made(arrives_broken, 3),
            "batch_size": None,
            "num_workers": 1,
            "collate_fn": identity,
        }

    with harness.taking(path):
        record = run(loader_class, Case(build))
    kinds = [step.outcome[0] for step in record.steps if step.call == "next"]
    assert kinds == ["batch", "error", "batch", "stop", "stop"]


class Collated(Dataset):
    """Samples of kinds that `default_collate` writes straight into the slot."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 9

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        if self.kind == "image":
            return torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8, generator=generator), index
        if self.kind == "array":
            return {"a": np.full((50, 50), index, dtype=np.float32), "b": np.float64(index), "s": f"s{index}"}
        if self.kind == "ragged":
            return [torch.arange(4), (index, float(index)), {"n": b"x"}, None][: 3 if index < 9 else 4]
        if self.kind == "requires grad":
            return torch.full((2000,), float(index), requires_grad=True)
        if self.kind == "strided":
            return torch.arange(10_000.0).reshape(100, 100).t() + index
        if self.kind == "nested":
            return {"x": [{"y": torch.full((3000,), index)}, (torch.tensor(index),)]}
        if self.kind == "collates itself":
            inner = torch.utils.data.default_collate([torch.full((3000,), index) for _ in range(4)])
            return inner.sum(0) if index % 2 else inner[0]
        raise AssertionError(self.kind)


COLLATED = ["image", "array", "ragged", "requires grad", "strided", "nested", "collates itself"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", COLLATED)
def test_default_collate(loader_class, kind, workers):
    compare(
        loader_class,
        Case(lambda: {"dataset": Collated(kind), "batch_size": 4, "num_workers": workers}, epochs=2),
    )


def views_of_a_stack(samples):
    stacked = torch.stack([sample[0] for sample in samples])
    return {
        "all": stacked,
        "first": stacked[0],
        "half": stacked[:, :, ::2],
        "labels": [s[1] for s in samples],
    }


def into_out(samples):
    """Writes into the storage that torch's collate would allocate, as PyG does."""
    first = samples[0][0]
    storage = first._typed_storage()._new_shared(first.numel() * len(samples), device="cpu")
    out = first.new(storage).resize_(len(samples), *first.shape)
    return torch.stack([sample[0] for sample in samples], out=out)


def shared_by_hand(samples):
    return torch.stack([sample[0] for sample in samples]).share_memory_()


@pytest.mark.parametrize("collate", [views_of_a_stack, into_out, shared_by_hand])
def test_own_collate(loader_class, collate):
    def build():
        return {"dataset": Collated("image"), "batch_size": 4, "num_workers": 2, "collate_fn": collate}

    compare(loader_class, Case(build, epochs=2))


class Alike(Dataset):
    """Batches that differ in nothing but the tensors' elements, in which strings and ``other`` come again."""

    def __init__(self, other):
        self.other = other

    def __len__(self):
        return 6

    def __getitem__(self, index):
        other = self.other(index)
        rows = [{"x": torch.tensor([index, row]), "name": "row", "row": row} for row in range(3)]
        return {
            "name": "x",
            "rows": rows,
            "pair": ("name", ["row", "x", torch.tensor(index)]),
            "last": [other, other],
        }


OTHERS = {"tensor": torch.tensor, "string": lambda _: "s", "tuple": lambda _: ("t",), "list": lambda _: [1]}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_objects_that_come_again_in_batches_that_look_the_same(loader_class, other):
    compare(loader_class, Case(lambda: {"dataset": Alike(other), "batch_size": None, "num_workers": 1}))


class Large(Dataset):
    def __init__(self, elements):
        self.elements = elements

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.arange(self.elements, dtype=torch.int64) * (index + 1)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_hundred_megabytes(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Large(13_000_000), "batch_size": None, "num_workers": 2}))


def test_ten_megabytes(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Large(1_300_000), "batch_size": None, "num_workers": 2}))


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "default_device", "default_dtype"])
def test_consumer_modes(loader_class, mode):
    """The mode of the thread that calls `next`."""

    def build():
        return {"dataset": Collated("image"), "batch_size": 4, "num_workers": 1}

    def walk():
        if mode == "inference_mode":
            with torch.inference_mode():
                return compare(loader_class, Case(build))
        if mode == "no_grad":
            with torch.no_grad():
                return compare(loader_class, Case(build))
        if mode == "default_device":
            with torch.device("meta"):
                return compare(loader_class, Case(build))
        torch.set_default_dtype(torch.float64)
        try:
            return compare(loader_class, Case(build))
        finally:
            torch.set_default_dtype(torch.float32)

    walk()


ELSEWHERE = """
    class Here:
        def __len__(self):
            return 2
        def __getitem__(self, index):
            return torch.full((2,), index * 1j, device="cpu").conj()
    def make_elsewhere(worker):
        torch.set_default_device("xla")
    for batch in DataLoader(Here(), batch_size=None, num_workers=1, worker_init_fn=make_elsewhere):
        print(batch.device, batch.shape)
"""


def test_a_default_device_that_a_worker_cannot_use(loader_name, tmp_path):
    """In a process of its own: what the transport asks of torch once may be known in this one."""
    ended = run_script(loader_name, ELSEWHERE, tmp_path)
    assert ended.out == "cpu torch.Size([2])\n" * 2, ended.err


def test_describe_tells_apart():
    """The comparison itself notices what it must notice."""
    x = torch.arange(6.0).reshape(2, 3)
    pairs = [
        (x, x.clone().t().contiguous().t()),
        ([x, x], [x, x.clone()]),
        ([x, x[1:]], [x, x[1:].clone()]),
        (x, x.double()),
        (x, x.clone().requires_grad_()),
        (0.0, -0.0),
        (1, True),
        ([1], (1,)),
        (np.arange(3), np.arange(3)[::-1][::-1].astype(">i8")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (ALL["object: own list"](), [1, torch.arange(2)]),
        (float("nan"), 0.0),
    ]
    for left, right in pairs:
        assert describe(left) != describe(right), (left, right)
        assert describe(left) == describe(copy.deepcopy(left))
