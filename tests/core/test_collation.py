"""Native parts of collation, parts left to torch, and where they are written: in one process."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate

import ringloader._native as _native
from parity.describe import describe
from ringloader._worker import collate

IMAGE = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
Point = collections.namedtuple("Point", "x y")


class OwnDict(dict):
    pass


class AsTwo:
    """An int of the user's, which torch asks for its value."""

    def __int__(self):
        return 2

    def __index__(self):
        return 2


class RefusedError(Exception):
    pass


def refuse(_, **__):
    raise RefusedError


def refuse_containers(batch, **named):
    """torch's own for what is not native, but not for the whole."""
    if isinstance(batch[0], (dict, list, tuple)):
        raise RefusedError
    return TORCHS_COLLATE(batch, **named)


TORCHS_COLLATE = torch_collate.collate
FN_MAP = torch_collate.default_collate_fn_map


@pytest.fixture
def port():
    """The worker's end of a transport within this process, at a task."""
    engine = _native.Engine(1, 4, 64 << 20)
    port = _native.Port.inherit(engine, 0)
    engine.put(0, (0, [0, 1]))
    port.get()
    yield port
    engine.close()


NATIVE = [
    [torch.tensor([1, 2]).t(), torch.zeros(2)],
    [(IMAGE, 1), (IMAGE, 2)],
    [{"a": 1.5, "b": [True, "text"]}, {"a": 2.5, "b": [False, "texts"]}],
    [{}, {}],
    [((), b"a")],
    [np.arange(3), np.arange(3)],
    [(np.float32(1), torch.eye(3).t()), (np.float32(1), torch.eye(3).t())],
    [1, 2.5],
    ("a", "b"),
]


@pytest.mark.parametrize("batch", NATIVE, ids=repr)
def test_common_samples_are_not_torchs_matter(port, batch):
    collate = _native.Collate(port, refuse_containers, [], [], FN_MAP)
    assert describe(collate(batch, collate_fn_map=FN_MAP)) == describe(default_collate(batch))


@pytest.mark.parametrize(
    "batch", [[None], [Point(1, 2)], [OwnDict()], [[1], [1, 2]], [{1: 2}], {0: 1}, []], ids=repr
)
def test_other_samples_are(port, batch):
    collate = _native.Collate(port, refuse, [], [], FN_MAP)
    with pytest.raises(RefusedError):
        collate(batch, collate_fn_map=FN_MAP)


class Taught:
    """A class of others in torch's map: it is asked of each sample that has none of torch's types."""


class ListsOfThree(type):
    def __instancecheck__(cls, instance):
        return type(instance) is list and len(instance) == 3


class ListOfThree(metaclass=ListsOfThree):
    """One that goes by what is in a sample."""


TAUGHT = [Taught, ListOfThree, (collections.OrderedDict, Point)]


@pytest.mark.parametrize("batch", NATIVE, ids=repr)
def test_types_that_others_taught_take_nothing_from_common_samples(port, batch):
    collate = _native.Collate(port, refuse_containers, [], [], FN_MAP, TAUGHT)
    assert describe(collate(batch, collate_fn_map=FN_MAP)) == describe(default_collate(batch))


@pytest.mark.parametrize(
    ("taught", "batch"),
    [
        (dict, [{"a": 1}]),
        (collections.abc.Sequence, [(1, (2, 3))]),
        (ListOfThree, [{"a": [1, 2, 3]}]),
        (object, [1, True]),
        (bool, [[True]]),
        ((Taught, np.float32), [(1, np.float32(1))]),
    ],
    ids=repr,
)
def test_what_they_took_is_torchs_matter(port, taught, batch):
    torchs = []
    collate = _native.Collate(port, lambda batch, **_: torchs.append(batch), [], [], FN_MAP, [Taught, taught])
    collate(batch, collate_fn_map=FN_MAP)
    # Once, and the whole.
    assert torchs == [batch]


class Counted:
    """Neither a number nor a list, which torch finds out in the second sample."""

    looks = 0

    @property
    def __class__(self):
        Counted.looks += 1
        return Counted


# The last one, where torch collates the first column before it refuses the second one.
@pytest.mark.parametrize("batch", [[Counted()], [1, Counted()], [(1, [1]), (Counted(), [1, 2])]], ids=len)
def test_code_of_the_users_runs_as_often_as_with_torch(port, monkeypatch, batch):
    def looks():
        Counted.looks = 0
        with pytest.raises((TypeError, RuntimeError)):
            default_collate(batch)
        return Counted.looks

    expected = looks()
    _replace_collate(port, monkeypatch)
    assert looks() == expected > 0


def test_what_torch_warns_of_is_torchs(port):
    samples = [torch.zeros(4, dtype=torch.uint8).view(torch.complex32)]
    with pytest.raises(RefusedError):
        _native.Collate(port, refuse, [], [], FN_MAP)(samples, collate_fn_map=FN_MAP)


@pytest.mark.parametrize("fn_map", [None, {}, dict(FN_MAP)], ids=["none", "empty", "copy"])
def test_other_maps_are(port, fn_map):
    collate = _native.Collate(port, refuse, [], [], FN_MAP)
    with pytest.raises(RefusedError):
        collate([1, 2], collate_fn_map=fn_map)


@pytest.mark.parametrize("length", [70_001, 4095, 4096])
def test_rows_of_a_large_batch_may_begin_anywhere(port, length):
    count = (8 << 20) // length + 1
    values = np.arange(length + 7 * count).astype(np.uint8)
    samples = [values[7 * at : 7 * at + length] for at in range(count)]
    made = _native.Collate(port, refuse, [], [], FN_MAP)(samples, collate_fn_map=FN_MAP)
    assert torch.equal(made, torch.from_numpy(np.stack(samples)))


def test_text_is_handed_back(port):
    batch = ["a", "b"]
    assert _native.Collate(port, refuse, [], [], FN_MAP)(batch, collate_fn_map=FN_MAP) is batch


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="torch stacks tensors that it cannot describe",
)
def test_tensors_are_written_into_the_slot(port, monkeypatch):
    made_at_once(port, monkeypatch, [(IMAGE, 1), (IMAGE, 2)])


@pytest.mark.parametrize("dtype", "?bBhHiIlLqefdFD")
def test_arrays_are_written_into_the_slot(port, monkeypatch, dtype):
    image = IMAGE.numpy().astype(dtype)
    made_at_once(port, monkeypatch, [(image, 1), (image, 2)])


@pytest.mark.parametrize("container", [Point, lambda *items: OwnDict(enumerate(items))])
def test_what_is_in_containers_of_others_too(port, monkeypatch, container):
    image = IMAGE.numpy()
    made_at_once(port, monkeypatch, [container(image, 1), container(image, 2)])


def test_what_is_in_a_batch_with_types_that_others_taught(port, monkeypatch):
    monkeypatch.setitem(FN_MAP, Taught, refuse)
    image = IMAGE.numpy()
    made_at_once(port, monkeypatch, [(image, 1), (image, 2)])


def made_at_once(port, monkeypatch, samples):
    """Checks that both tensors of a batch lie in the slot, one behind the other."""
    expected = describe(default_collate(samples))
    _replace_collate(port, monkeypatch)
    batch = default_collate(samples)
    assert describe(batch) == expected
    first, second = batch.values() if isinstance(batch, dict) else batch
    assert 0 < second.data_ptr() - first.data_ptr() == first.nbytes


def _replace_collate(port, monkeypatch):
    monkeypatch.setattr(torch_collate, "collate", TORCHS_COLLATE)
    collate.replace_collate(port)


@pytest.mark.parametrize("data", [IMAGE, {"a": IMAGE}, [1, "a"], (IMAGE, b"c", None, 2.5, True)], ids=repr)
def test_common_data_is_not_converted_by_torch(data):
    assert describe(_native.Convert(refuse, [])(data)) == describe(default_convert(data))


@pytest.mark.parametrize("data", [np.arange(3), [np.arange(3)], [[1]], Point(1, 2), OwnDict(a=1), AsTwo()])
def test_other_data_is(data):
    with pytest.raises(RefusedError):
        _native.Convert(refuse, [])(data)


def test_functions_of_others_stay_theirs():
    for function in (refuse, default_collate, None, "text"):
        assert collate.native(function) is function
    assert isinstance(collate.native(default_convert), _native.Convert)
