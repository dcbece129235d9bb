"""``SharedArray``: numpy's array over memory that processes share."""

import contextlib
import copy
import gc
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ringloader import DataLoader, SharedArray

pytestmark = pytest.mark.rings_only


def test_a_shape_gives_zeros_and_an_array_a_copy():
    zeros = SharedArray((2, 3), np.int16)
    assert isinstance(zeros, np.ndarray) and zeros.dtype == np.int16 and zeros.tolist() == [[0] * 3] * 2
    assert SharedArray(4).dtype == np.float64 and SharedArray(4).shape == (4,)
    source = np.arange(6).reshape(2, 3).T
    array = SharedArray(source)
    source[0, 0] = 9
    assert array.dtype == source.dtype and array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert SharedArray([1, 2], np.float32).dtype == np.float32
    assert SharedArray(torch.ones(2)).tolist() == [1, 1]
    for empty in (SharedArray((0, 3)), SharedArray([]), SharedArray(()), SharedArray.from_rows([])):
        assert empty.nbytes in (0, 8)
    with pytest.raises(ValueError, match="negative"):
        SharedArray((-1,))
    with pytest.raises(TypeError, match="use SharedList"):
        SharedArray(["a", None])
    with pytest.raises(TypeError, match="use SharedList"):
        SharedArray.from_rows([[None]])


def test_rows_are_taken_one_by_one():
    rows = (np.full((3, 2), number, np.uint8)[::-1] for number in range(200))
    array = SharedArray.from_rows(rows)
    assert array.shape == (200, 3, 2) and array.dtype == np.uint8
    assert (array == np.arange(200)[:, None, None]).all()
    assert SharedArray.from_rows([1.5, 2.5]).tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match=r"row 1 has the shape \(3,\), and row 0 has \(2,\)"):
        SharedArray.from_rows([[1, 2], [1, 2, 3]])
    with pytest.raises(TypeError, match="safe"):
        SharedArray.from_rows([[1], [1.5]])


def test_what_is_read_or_computed_is_a_plain_array():
    array = SharedArray(np.arange(12.0).reshape(3, 4))
    derived = [array[0], array[1:], array[[0, 1]], array + 1, np.sqrt(array), next(iter(array)), array.sum(0)]
    assert {type(one) for one in derived} == {np.ndarray}
    assert isinstance(array.sum(), np.float64) and isinstance(array[0, 0], np.float64)
    assert np.shares_memory(array[1:], array)
    array += 1
    assert type(array) is SharedArray and array[0, 0] == 1
    assert torch.utils.data.default_collate([array[0], array[1]]).tolist() == (array[:2]).tolist()


def descriptors():
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            count += "ringloader-array" in str(entry.readlink())
    return count


def test_memory_goes_with_the_last_view_and_a_copy_does_not_keep_it():
    array = SharedArray((1000, 1000))
    view, own = array[5], array.copy()
    del array
    gc.collect()
    assert "ringloader-array" in Path("/proc/self/maps").read_text(), "a view keeps it"
    view[:] = 7
    assert (view == 7).all()
    del view
    gc.collect()
    assert descriptors() == 0 and "ringloader-array" not in Path("/proc/self/maps").read_text()
    assert own.sum() == 0


def test_a_failed_build_leaves_no_descriptor():
    for bad in ((-1,), ["a", None]):
        with pytest.raises((ValueError, TypeError)):
            SharedArray(bad)
    with pytest.raises(ValueError):
        SharedArray.from_rows([[1, 2], [1]])
    gc.collect()
    assert descriptors() == 0


def test_a_plain_pickle_and_a_copy_have_memory_of_their_own():
    array = SharedArray([1, 2, 3])
    copies = [pickle.loads(pickle.dumps(array)), copy.deepcopy(array), array.copy(), copy.copy(array)]
    array[0] = 9
    assert all(one.tolist() == [1, 2, 3] for one in copies)
    assert type(copies[0]) is type(copies[1]) is SharedArray
    assert type(pickle.loads(pickle.dumps(copies[2]))) is np.ndarray


def write_in_child(array, part, fixed, pipe):
    array[0] = 41
    part[0, 0] = 42
    pipe.send((type(array), type(part), fixed.flags.writeable, fixed.tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_is_started_writes_to_the_same_memory(method):
    context = multiprocessing.get_context(method)
    array, square, fixed = SharedArray(5, int), SharedArray((2, 3), int), SharedArray([7])
    fixed.flags.writeable = False
    ours, theirs = context.Pipe()
    child = context.Process(target=write_in_child, args=(array, square.T, fixed, theirs))
    child.start()
    assert ours.poll(60)
    found = ours.recv()
    child.join(60)
    assert found == (SharedArray, SharedArray, False, [7])
    assert array.tolist() == [41, 0, 0, 0, 0] and square.tolist() == [[42, 0, 0], [0, 0, 0]]


class Counting(torch.utils.data.Dataset):
    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        self.array[index] += 1
        return self.array[index]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_workers_write_is_seen(method):
    array = SharedArray(np.arange(24).reshape(8, 3))
    loader = DataLoader(Counting(array), batch_size=4, num_workers=2, multiprocessing_context=method)
    for epoch in (1, 2):
        batches = torch.cat(list(loader))
        assert batches.tolist() == array.tolist() == (np.arange(24).reshape(8, 3) + epoch).tolist()


COPIES = {
    "copy": lambda array: array.copy(),
    "astype": lambda array: array.astype(array.dtype),
    "flatten": lambda array: array.flatten(),
    "ravel": lambda array: array.T.ravel(),
    "reshape": lambda array: array.T.reshape(-1),
    "take": lambda array: array.take([0, 1]),
    "repeat": lambda array: array.repeat(2),
    "copy of numpy": lambda array: np.copy(array, subok=True),
    "empty_like": np.empty_like,
    "concatenate": lambda array: np.concatenate([array, array]),
    "sort": np.sort,
    "split": lambda array: np.array_split(array[[0, 1]], 1)[0],
    "index": lambda array: array[[0, 1]],
    "sum": lambda array: array + 1,
    "cumsum": lambda array: array.cumsum(),
    "round": lambda array: array.round(),
}
VIEWS = {
    "T": lambda array: array.T,
    "reshape": lambda array: array.reshape(-1),
    "ravel": lambda array: array.ravel(),
    "view": lambda array: array.view(np.uint8),
    "squeeze": lambda array: array.squeeze(),
    "swapaxes": lambda array: array.swapaxes(0, 1),
    "astype": lambda array: array.astype(array.dtype, copy=False),
}


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_plain_array(made):
    array = SharedArray(np.arange(6.0).reshape(2, 3))
    copy = made(array)
    assert type(copy) is np.ndarray
    assert not np.shares_memory(copy, array)


@pytest.mark.parametrize("made", VIEWS.values(), ids=VIEWS)
def test_a_view_stays_shared(made):
    array = SharedArray(np.arange(6.0).reshape(2, 3))
    view = made(array)
    assert type(view) is SharedArray
    assert np.shares_memory(view, array)


def test_a_shape_that_cannot_be():
    with pytest.raises(ValueError, match=r"cannot have the shape \(-1,\): a dimension is negative"):
        SharedArray(-1)
    with pytest.raises(MemoryError, match=r"shape \(1000000000000000,\), 8000000000000000 bytes"):
        SharedArray((10**15,))
    with pytest.raises(MemoryError, match=r"shape \(1000000000000000000000,\)"):
        SharedArray((10**21,))
    with pytest.raises(TypeError, match="float"):
        SharedArray((1.5,))
