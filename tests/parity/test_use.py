"""Uses of a batch that was received, and of errors, beside torch."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from parity.datasets import identity
from parity.side_by_side import assert_same
from small_datasets import Made


def make_sample(index):
    """A few leaves of several sizes and sorts."""
    return {
        "small": torch.full((3,), float(index)),
        "large": torch.full((64, 256), index, dtype=torch.int32),
        "bool": torch.tensor([True, False]),
        "half": torch.full((5,), index, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "array": np.full((4,), index, dtype=np.float32),
    }


def _grow(tensor):
    return tensor.resize_(tensor.numel() + 100_000).shape


USES = {
    "resize_ to less": lambda tensor: tensor.resize_(1),
    "resize_ to more": _grow,
    "resize of the storage": lambda tensor: tensor.untyped_storage().resize_(10**6),
    "share_memory_": lambda tensor: (tensor.share_memory_(), tensor.is_shared()),
    "requires_grad_": lambda tensor: tensor.requires_grad_(),
    "backward": lambda tensor: (tensor.requires_grad_().sum().backward(), tensor.grad),
    "in place": lambda tensor: tensor.add_(1).mul_(2),
    "set_": lambda tensor: tensor.set_(torch.zeros(3, dtype=tensor.dtype)),
    "swap data": lambda tensor: setattr(tensor, "data", torch.zeros(7, dtype=tensor.dtype)) or tensor,
    "detach": lambda tensor: tensor.detach(),
    "numpy": lambda tensor: tensor.numpy(),
    "storage offset": lambda tensor: [tensor.storage_offset(), tensor[1:].storage_offset()],
    "version": lambda tensor: -tensor._version + tensor.add_(0)._version,
    "view as bytes": lambda tensor: tensor.view(torch.uint8),
    "as a view": lambda tensor: [tensor._is_view(), tensor.is_leaf, tensor._base is None],
    "size of the storage": lambda tensor: tensor.untyped_storage().nbytes(),
    "pin state": lambda tensor: tensor.is_pinned() if torch.accelerator.is_available() else None,
    "flags": lambda tensor: [tensor.is_contiguous(), tensor.is_inference(), tensor.names],
    "deepcopy": lambda tensor: [copy.deepcopy(tensor), copy.deepcopy(tensor).untyped_storage().nbytes()],
    "pickled size": lambda tensor: _pickled_size(tensor),
    "saved size": lambda tensor: _saved(tensor),
}


def _pickled_size(tensor: torch.Tensor) -> int:
    """Without the storage's name, which is its address, of one digit more or less."""
    name = str(tensor.untyped_storage()._cdata).encode()
    pickled = pickle.dumps(tensor)
    assert name in pickled
    return len(pickled.replace(name, b""))


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


@pytest.mark.parametrize("collated", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", USES)
def test_a_tensor_is_used(loader_class, name, collated):
    """Collate wrote the tensor into shared memory, or it was copied there; small and large."""

    def scenario(kind, told):
        arguments = {"batch_size": 2} if collated else {"batch_size": None, "collate_fn": identity}
        for batch in kind(Made(make_sample, 4), num_workers=1, **arguments):
            for key in ("small", "large", "bool", "half"):
                told.step(key, lambda batch=batch, key=key: USES[name](batch[key]))
            if name != "resize_ to more":
                # torch refuses that, and leaves a tensor that is larger than its storage.
                told.step("batch", lambda batch=batch: batch)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("collated", [True, False])
def test_a_tensor_without_elements_is_used(loader_class, collated):
    def scenario(kind, told):
        arguments = {"batch_size": 2} if collated else {"batch_size": None, "collate_fn": identity}
        for batch in kind(Made(make_sample, 4), num_workers=1, **arguments):
            empty = batch["empty"]
            told.step("shape and strides", lambda empty=empty: [empty.shape, empty.stride(), empty.dtype])
            if not collated:
                told.step("resize_ to more", lambda empty=empty: empty.resize_(10).shape)
            told.step("zero", lambda empty=empty: empty.zero_())

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ["requires_grad_", "in place", "backward", "flags", "version"])
def test_a_tensor_is_used_in_a_mode(loader_class, name, mode):
    def scenario(kind, told):
        with mode():
            for batch in kind(Made(make_sample, 4), num_workers=1, batch_size=2):
                told.step(name, lambda batch=batch: USES[name](batch["small"]))

    assert_same(scenario, loader_class)


class Own:
    def __init__(self, number):
        self.number = number


def own_dataset(index):
    return Own(index)


def _collate_own(samples, *, collate_fn_map=None):  # noqa: ARG001
    return torch.tensor([sample.number for sample in samples])


def test_a_type_that_the_user_taught_collate(loader_class, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Own, _collate_own)

    def scenario(kind, told):
        told.iterate(kind(Made(own_dataset, 4), num_workers=1, batch_size=2))

    assert_same(scenario, loader_class)


def _rebuild(number):
    return ["rebuilt", number]


@pytest.mark.parametrize("nested", [False, True])
def test_a_type_that_the_user_taught_to_travel(loader_class, monkeypatch, nested):
    monkeypatch.setitem(ForkingPickler._extra_reducers, Own, lambda own: (_rebuild, (own.number,)))

    def scenario(kind, told):
        collate = (lambda value: {"own": value, "t": torch.ones(3)}) if nested else identity
        told.iterate(kind(Made(own_dataset, 4), num_workers=1, batch_size=None, collate_fn=collate))

    steps = assert_same(scenario, loader_class)
    assert "rebuilt" in str(steps)


class Noted(Exception):  # noqa: N818
    def __init__(self, one, two):
        super().__init__(one, two)


class KeywordsOnly(Exception):  # noqa: N818
    def __init__(self, *, code):
        super().__init__(f"code {code}")


class SpeaksTwice(Exception):  # noqa: N818
    def __str__(self):
        return "said otherwise"


class Raises(Dataset):
    def __init__(self, make, batched):
        self.make = make
        if batched:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 1:
            raise self.make()
        return index


def _with_notes():
    error = ValueError("text")
    error.add_note("see the manual")
    return error


def _with_cause():
    error = ValueError("text")
    error.__cause__ = KeyError("cause")
    return error


# Groups are in test_whole_errors.py: torch loses them.
MAKES = {
    "notes": _with_notes,
    "cause": _with_cause,
    "two arguments": lambda: Noted(1, "two"),
    "keywords": lambda: KeywordsOnly(code=3),
    "own text": lambda: SpeaksTwice("x"),
    "no text": lambda: AssertionError(),
    "long": lambda: ValueError("long " * 50_000),
    "surrogates": lambda: ValueError("\ud800"),
    "assertion": lambda: AssertionError("not so"),
    "system": lambda: OSError(28, "No space left on device", "file"),
    "not implemented": lambda: NotImplementedError("later"),
    "recursion": lambda: RecursionError("deep"),
    "memory": lambda: MemoryError(),
    "warning": lambda: UserWarning("raised"),
    "stop async": lambda: StopAsyncIteration(),
    "index": lambda: IndexError("list index out of range"),
}


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKES)
def test_an_error_of_the_dataset(loader_class, name, batched):
    def scenario(kind, told):
        told.iterate(kind(Raises(MAKES[name], batched), num_workers=1, batch_size=1))

    steps = assert_same(scenario, loader_class)
    assert any(step[1][0] == "error" for step in steps)


@pytest.mark.rings_only
@pytest.mark.limit(120)
def test_an_error_of_a_local_class_is_told(loader_class):
    """torch loses the error in the feeder thread and waits without end."""

    class Local(Exception):  # noqa: N818
        pass

    batches = []
    iterator = iter(loader_class(Raises(lambda: Local("here"), False), num_workers=1))
    batches.append(next(iterator))
    with pytest.raises(Exception, match="Local"):
        next(iterator)
    batches += list(iterator)
    assert [int(batch) for batch in batches] == [0, 2, 3]


def test_warnings_as_errors(loader_class):
    """A warning of torch's at the start becomes its error, and nothing is left."""

    def scenario(kind, told):
        import warnings

        loader = kind(Made(make_sample, 4), num_workers=1)
        loader.num_workers = 40

        def strict():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return iter(loader)

        told.step("iter", strict)
        loader.num_workers = 1
        told.iterate(loader)

    steps = assert_same(scenario, loader_class)
    assert "UserWarning" in str(steps[0][1])
