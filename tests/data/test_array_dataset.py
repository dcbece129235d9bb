"""ArrayDataset: items, wrong arguments, and memory maps that are pickled by the names of their files."""

from __future__ import annotations

import copy
import pickle
import resource

import numpy as np
import pytest
import torch
import torch.utils.data

from ringloader import ArrayDataset, DataLoader

IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
LABELS = torch.arange(4)
NAMES = list("abcd")


def test_one_array_is_its_rows():
    dataset = ArrayDataset(IMAGES)
    assert len(dataset) == 4
    assert dataset[1].tolist() == IMAGES[1].tolist() and np.shares_memory(dataset[1], IMAGES)
    assert dataset[-1].tolist() == IMAGES[3].tolist()
    with pytest.raises(IndexError):
        dataset[4]


def test_several_arrays_are_tuples_and_named_ones_dicts():
    assert ArrayDataset(LABELS, NAMES)[2] == (torch.tensor(2), "c")
    assert ArrayDataset(name=NAMES, label=LABELS)[2] == {"name": "c", "label": torch.tensor(2)}
    assert ArrayDataset(NAMES, label=LABELS)[2] == ("c", {"label": torch.tensor(2)})
    assert ArrayDataset(NAMES, LABELS, x=NAMES)[0] == ("a", torch.tensor(0), {"x": "a"})


def test_no_rows_are_no_batches():
    dataset = ArrayDataset(IMAGES[:0], label=LABELS[:0])
    assert len(dataset) == 0
    for workers in (0, 1):
        assert list(DataLoader(dataset, batch_size=2, num_workers=workers)) == []


@pytest.mark.parametrize(
    ("arrays", "named", "error", "text"),
    [
        ((), {}, ValueError, "at least one array"),
        ((IMAGES, NAMES[:3]), {}, ValueError, r"argument 0: 4, argument 1: 3"),
        ((IMAGES,), {"label": LABELS[:1]}, ValueError, r"argument 0: 4, label: 1"),
        (({"x": 1},), {}, TypeError, r"argument 0 is of type dict, so pass it as \*\*named"),
        ((), {"x": iter(NAMES)}, TypeError, "x= is of type list_iterator"),
        ((), {"x": {1, 2}}, TypeError, "x= is of type set"),
        ((np.zeros(()),), {}, TypeError, r"argument 0 is ndarray of float64 \[\]"),
        ((torch.zeros(()),), {}, TypeError, r"argument 0 is Tensor of float32 \[\]"),
        ((3,), {}, TypeError, "argument 0 is of type int"),
    ],
)
def test_what_is_wrong_is_told(arrays, named, error, text):
    with pytest.raises(error, match=text):
        ArrayDataset(*arrays, **named)


def test_what_is_indexed_by_labels_is_refused():
    class Series(list):
        iloc = None

    with pytest.raises(TypeError, match=r"argument 0 is of type Series, .*to_numpy"):
        ArrayDataset(Series(NAMES))


def test_what_it_is_of_can_be_read():
    dataset = ArrayDataset(IMAGES, label=LABELS, name=NAMES)
    text = "ArrayDataset(ndarray of uint8 [4, 3, 2], label=Tensor of int64 [4], name=list of 4)"
    assert repr(dataset) == text


class Flipped(ArrayDataset):
    def __init__(self, *arrays, by):
        super().__init__(*arrays)
        self.by = by

    def __getitem__(self, index):
        return self.by * super().__getitem__(index)


def test_copies_and_pickles_are_like_it():
    dataset = ArrayDataset(IMAGES, label=LABELS, name=NAMES)
    assert copy.copy(dataset).arrays[0] is IMAGES
    assert b"_common" not in pickle.dumps(dataset), "a pickle outlives our modules"
    for other in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        image, named = other[3]
        assert image.tolist() == IMAGES[3].tolist() and named == {"label": LABELS[3], "name": "d"}
    assert pickle.loads(pickle.dumps(Flipped(LABELS, by=-2)))[3] == -6


ROWS = 5000


@pytest.fixture
def rows(tmp_path):
    """A file of rows behind a header, and what is in it."""
    whole = np.arange(ROWS * 6, dtype="<i4")
    path = tmp_path / "rows.bin"
    path.write_bytes(b"?" * 6148 + whole.tobytes())
    return path, whole.reshape(ROWS, 6)


VIEWS = {
    "all of it": lambda rows: rows,
    "a part": lambda rows: rows[3000:4000],
    "every third, backwards": lambda rows: rows[::-3],
    "columns backwards": lambda rows: rows[10:, ::-2],
    "transposed": lambda rows: rows.T,
    "another type": lambda rows: rows[1:7].view("<u2"),
    "read-only": lambda rows: np.broadcast_to(rows[2], (9, 6), subok=True),
    "a part of a part": lambda rows: rows[1000:][500:600, 1],
    "one row": lambda rows: rows[-1:],
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_map_is_pickled_by_the_name_of_its_file(rows, view, mode):
    path, whole = rows
    expected, mapped = (
        VIEWS[view](whole),
        VIEWS[view](np.memmap(path, "<i4", mode, offset=6148, shape=whole.shape)),
    )
    data = pickle.dumps(ArrayDataset(mapped))
    assert len(data) < 1000
    found = pickle.loads(data).arrays[0]
    assert type(found) is np.memmap and found.dtype == expected.dtype
    assert np.array_equal(found, expected) and found.strides == mapped.strides
    assert found.flags.writeable == mapped.flags.writeable
    # Again, of what was unpickled.
    assert np.array_equal(pickle.loads(pickle.dumps(ArrayDataset(found))).arrays[0], expected)
    if mode == "r+" and mapped.flags.writeable:
        mapped[0] = 77
        assert (found[0] == 77).all() and not (expected[0] == 77).any(), "one file"


def test_what_no_file_has_is_pickled(rows):
    path, whole = rows
    private = np.memmap(path, "<i4", "c", offset=6148, shape=whole.shape)
    private[7] = -1
    computed = np.memmap(path, "<i4", "r", offset=6148, shape=whole.shape) + 1
    gone = np.memmap(path, "<i4", "r", offset=6148, shape=whole.shape)
    path.unlink()
    for array in (private, computed, gone, private[:0]):
        found = pickle.loads(pickle.dumps(ArrayDataset(array))).arrays[0]
        assert np.array_equal(found, array)


def test_a_copy_has_the_map_itself(rows):
    mapped = np.memmap(rows[0], "u1", "r")
    assert copy.copy(ArrayDataset(x=mapped)).named["x"] is mapped


HUGE = 1 << 38
PAGE = 4096


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_of_a_map_larger_than_memory_only_the_rows_are_read(tmp_path, start):
    """A sparse file of 256 GiB: nobody could load it, and few pages of it are touched."""
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(HUGE)
    mapped = np.memmap(path, np.int64, "r+", shape=(HUGE // PAGE, PAGE // 8))
    chosen = [number * 1_000_003 for number in range(64)]
    for row in chosen:
        mapped[row] = row
    labels = np.memmap(path, np.int64, "r", shape=(HUGE // PAGE,))
    dataset = ArrayDataset(mapped, label=labels)
    assert len(pickle.dumps(dataset)) < 1000
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=chosen,
        num_workers=int(start is not None),
        multiprocessing_context=start,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows, named = zip(*loader, strict=True)
    assert torch.equal(torch.cat(rows)[:, 5], torch.tensor(chosen))
    assert torch.equal(torch.cat([part["label"] for part in named]), torch.from_numpy(labels[chosen]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 << 10, f"{grown} KiB"
