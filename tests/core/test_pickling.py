"""Questions of the native encoder to numpy, classes and pickle."""

import collections
import pickle
import re
import sys
import types
import typing
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import torch

from parity import batch_values
from parity.datasets import identity
from parity.describe import describe
from ringloader import DataLoader
from ringloader._common import pickling

Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    x: int


class Richer(Point):
    """Has a ``__dict__``."""


class Reduced(typing.NamedTuple):
    x: int


Reduced.__reduce__ = lambda self: (Reduced, (self.x + 1,))


@pytest.mark.parametrize(
    "dtype",
    ["?", "<i4", ">i4", "<f8", ">f2", "<c16", "S5", "<U7", ">U7", "<M8[ns]", "<m8[D]", "V3"],
)
def test_a_dtype_comes_back_from_its_name(dtype):
    array = np.zeros(3, dtype)
    keep, address, nbytes, itemsize, (fortran, read_only), tag, shape = pickling.array_tag(array)
    # Pickle is what torch's own loader sends arrays by.
    assert pickling.array_dtype(tag) == pickle.loads(pickle.dumps(array)).dtype
    assert (address, nbytes, itemsize, shape) == (keep.ctypes.data, array.nbytes, array.itemsize, [3])
    assert not fortran and not read_only


# numpy shows nobody the buffer of dates, so a pickle of read-only ones is writable.
_OTHERS = ("scalar", "with", "views", "read-only dates", "read-only, a date")
WHOLE_ARRAYS = [name for name in batch_values.ARRAYS if not name.startswith(_OTHERS)]


class WholeArrays:
    """An array of each kind."""

    def __len__(self):
        return len(WHOLE_ARRAYS)

    def __getitem__(self, index):
        return batch_values.ARRAYS[WHOLE_ARRAYS[index]]()


@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_arrive_as_that_protocol_has_them(monkeypatch, protocol):
    """That of a queue is 5 since Python 3.14, and 4 before."""
    monkeypatch.setattr(pickling, "_PROTOCOL", protocol)
    batches = DataLoader(WholeArrays(), batch_size=None, num_workers=1, collate_fn=identity)
    for name, arrived in zip(WHOLE_ARRAYS, batches, strict=True):
        expected = pickle.loads(pickle.dumps(batch_values.ARRAYS[name](), protocol))
        assert describe(arrived) == describe(expected), name
        if name.startswith("read-only") and not expected.flags.writeable:
            for array in (arrived, expected):
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.setflags(write=True)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "<i4"), ("b", ">f8", (2,))]),
        np.dtype([("a", "<i4"), ("b", "u1")], align=True),
        np.dtype("<i4", metadata={"unit": "m"}),
    ],
)
def test_a_dtype_that_its_name_does_not_tell_is_pickled(dtype):
    back = pickling.array_dtype(pickling.array_tag(np.zeros(2, dtype))[5])
    assert back == dtype
    assert back.metadata == pickle.loads(pickle.dumps(dtype)).metadata


@pytest.mark.parametrize("dtype", ["O", np.dtype([("a", "O")]), np.dtypes.StringDType()])
def test_items_that_are_not_their_bytes_have_no_leaf(dtype):
    assert pickling.array_tag(np.zeros(2, dtype)) is None


def test_a_named_tuple_that_was_defined_anew_is_the_new_one():
    module = sys.modules[__name__]
    module.Again = collections.namedtuple("Again", "x")
    old = module.Again
    name = pickling.named_tuple_name(old)
    module.Again = collections.namedtuple("Again", "x y")
    assert pickling.find_class(*name) is module.Again
    assert pickling.named_tuple_name(old) is None, "nor can pickle send it"


class OfAgain:
    """Named tuples of the class that the worker found when it began."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return sys.modules[__name__].Again(torch.tensor(index))


def test_named_tuples_of_like_batches_are_of_the_class_that_is_there_now(loader_class):
    module = sys.modules[__name__]
    module.Again = collections.namedtuple("Again", "x")
    batches = iter(loader_class(OfAgain(), batch_size=None, num_workers=1))
    for _ in range(3):
        assert type(next(batches)) is module.Again
    module.Again = collections.namedtuple("Again", "other")
    assert [type(batch) is module.Again for batch in batches] == [True] * 3


def test_a_strided_array_becomes_contiguous_as_pickle_makes_it():
    base = np.arange(24).reshape(4, 6)
    for view in (base[::2], base[:, ::-1], base.T, base, np.broadcast_to(base[0], (3, 6)), np.array(5)):
        keep, _, _, _, (fortran, _), _, shape = pickling.array_tag(view)
        back = pickle.loads(pickle.dumps(view))
        assert fortran == (back.flags.f_contiguous and not back.flags.c_contiguous)
        assert shape == list(back.shape)
        assert (keep == view).all()


def test_named_tuples_are_found_by_name():
    for cls in (Point, Typed):
        assert pickling.find_class(*pickling.named_tuple_name(cls)) is cls


def test_other_tuples_are_pickled():
    local = collections.namedtuple("local", "x")
    for cls in (tuple, Richer, Reduced, local, type("Plain", (tuple,), {})):
        assert pickling.named_tuple_name(cls) is None


def test_leaves_travel_beside_the_pickle():
    array = np.arange(3)
    batch = {"a": array, "b": [array, {1, 2}]}
    data = pickling.dumps(batch, lambda found: (pickling.leaf, (7,)) if found is array else NotImplemented)
    back = pickling.loads(data, [None] * 7 + ["leaf"])
    assert back == {"a": "leaf", "b": ["leaf", {1, 2}]}


@pytest.mark.parametrize("dumps", [pickling.dumps, pickling.exact_dumps])
def test_numbers_strings_and_plain_containers_are_not_asked_for(dumps):
    """A call for each of them took longer than to pickle them."""
    asked = []

    def leaves(found):
        asked.append(found)
        return NotImplemented

    batch = [UserDict(a=[1, 2**70, 2.5, None, True], b={"c": ("text", b"bytes")}), np.float32(1), types]
    with pytest.raises(TypeError, match="module"):
        dumps(batch, leaves)
    kinds = (int, float, bool, str, bytes, list, tuple, dict, type(None))
    assert UserDict in [type(found) for found in asked] and np.float32 in [type(found) for found in asked]
    assert not [found for found in asked if type(found) in kinds]


@pytest.mark.parametrize(
    "make", [np.ndarray.copy, lambda array: array.view(np.memmap)], ids=["array", "memmap"]
)
@pytest.mark.parametrize(
    "axes", [np.s_[::-1], np.s_[:, ::-1], np.s_[2:0:-1, ::-2], np.s_[1:1:-1], np.s_[0::-1]]
)
def test_reversed_axes_of_exact_pickles_stay_reversed(make, axes):
    array = np.ndarray.__getitem__(make(np.arange(12).reshape(3, 4)), axes)
    back = pickling.loads(pickling.exact_dumps([array, array], lambda _: NotImplemented), [])
    assert back[0] is back[1] and type(back[0]) is type(array) and np.array_equal(back[0], array)
    assert [stride < 0 for stride in back[0].strides] == [stride < 0 for stride in array.strides]


class OwnArray(np.ndarray):
    pass


class OwnTensor(torch.Tensor):
    pass


def test_leaves_in_objects_of_any_class_are_found():
    """Once each, also within subclasses of tensors and arrays."""
    array, tensor = np.arange(1000), torch.arange(1000)
    batch = UserDict(
        a=[array, tensor, array], b=array.view(OwnArray), c=tensor.as_subclass(OwnTensor), d={array.tobytes()}
    )
    loader = DataLoader([batch], batch_size=None, collate_fn=lambda found: found, num_workers=1)
    (back,) = loader
    assert back["a"][0] is back["a"][2] and np.array_equal(back["a"][0], array)
    assert torch.equal(back["a"][1], tensor) and type(back["c"]) is OwnTensor and type(back["b"]) is OwnArray
    assert torch.equal(back["c"].as_subclass(torch.Tensor), tensor) and np.array_equal(back["b"], array)
    assert back["d"] == {array.tobytes()}


def test_an_index_that_cannot_be_pickled_names_the_cause():
    with pytest.raises(TypeError, match=r"the index .* that the sampler yielded cannot be sent"):
        pickling.dumps_index(lambda: None)


class Odd:
    """Travels by pickle."""

    def __init__(self, content):
        self.content = content


class OneHuge:
    """Gives the worker's own memory in MiB, but for one item."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index in (0, 2):
            # Made before the first look too: what Python keeps of its own objects is not the pickle's.
            huge = Odd([str(number) * 8 for number in range(1_000_000)])
            if index == 2:
                return huge
            del huge
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) >> 10


@pytest.mark.rings_only
def test_memory_of_one_huge_batch_is_not_kept(monkeypatch):
    monkeypatch.setenv("RINGLOADER_MALLOC", "0")
    found = list(DataLoader(OneHuge(), batch_size=None, num_workers=1))
    assert len(found[2].content) == 1_000_000
    assert found[-1] < found[0] + 45, "its pickle has some 60 MB"


def test_lists_of_integers_arrive_as_they_are():
    """They are one token, with as few bytes for each as all need."""
    edges = [
        sign * 2**bits + more for bits in (7, 8, 15, 16, 31, 32, 62) for sign in (-1, 1) for more in (-1, 0)
    ]
    lists = [[number, 0, 1, 2] for number in [*edges, 2**63 - 1, -(2**63)]]
    same = list(range(100))
    itself = [1, 2, 3, 4]
    itself.append(itself)
    others = [
        [1, 2, 3, True],
        [1, 2, 3, 4.0],
        [1, 2, 3, 2**63],
        [1, 2, 3, None],
        [],
        [5],
        [same, same],
        itself,
    ]
    (back,) = DataLoader([[lists, others]], batch_size=None, collate_fn=identity, num_workers=1)
    assert back[0] == lists
    for found, expected in zip(back[1][:-2], others[:-2], strict=True):
        assert found == expected and list(map(type, found)) == list(map(type, expected))
    assert back[1][-2] == [same, same] and back[1][-2][0] is back[1][-2][1]
    assert back[1][-1][:4] == itself[:4] and back[1][-1][4] is back[1][-1]
    repeated = DataLoader([[list(range(200, 300))]] * 5, batch_size=None, collate_fn=identity, num_workers=1)
    batches = list(repeated)
    assert batches == [[list(range(200, 300))]] * 5
    assert len({id(batch[0]) for batch in batches}) == 5
