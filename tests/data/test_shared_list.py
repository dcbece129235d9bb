"""``SharedList``: a list's behaviour, over memory that processes share."""

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import operator
import os
import pickle
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.script import run_script
from ringloader import SharedList

pytestmark = pytest.mark.rings_only

SHARED = {"a": 1}
SHARED_TWICE = [SHARED, SHARED]
NESTED: list = []
for _ in range(40):
    NESTED = [NESTED, 1]
ITEMS = [
    "", "ascii", "é\0ü", "\ud800", "日本" * 300, b"", b"\0\xff" * 100, 0, -1, 127, -128, 128, 2**31, -(2**63),
    2**63 - 1, 2**63, -(10**40), True, False, None, 0.0, -0.0, 1e308, float("inf"), (), [], {},
    (1, ("a", [b"x"])),
    {"caption": "a cat", 3: [1.5, None], (1, 2): {"x": True}},
    NESTED, {1, 2}, range(3), 1 + 2j, SHARED_TWICE,
    np.float32(3), pytest.approx, torch.Size([2, 3]),
]  # fmt: skip


def same(one, other):
    return type(one) is type(other) and one == other and repr(one) == repr(other)


def test_items_come_back_with_their_types():
    items = SharedList(ITEMS)
    assert len(items) == len(ITEMS)
    for index, item in enumerate(ITEMS):
        assert same(items[index], item), item
        assert same(items[index - len(ITEMS)], item), item
    assert all(map(same, items, ITEMS))


def test_an_item_is_new_at_each_look_and_one_object_in_it_twice_is_two():
    items = SharedList([SHARED_TWICE])
    items[0].append("changed")
    assert items[0] == SHARED_TWICE
    first, second = items[0]
    assert first is not second
    loop: list = []
    loop.append(loop)
    (found,) = SharedList([loop])
    assert found[0] is found


def test_keys_of_dicts_are_one_string_in_a_process():
    long = "k" * 65
    dicts = [
        {"file": "file", "größe": 1, long: 2, 3: {"file": 4}, "": None, ("file",): 5, f"{number}": number}
        for number in range(3000)
    ]
    dicts.append({"\ud800": 1, "file": 2})
    items = SharedList(dicts)
    assert items == dicts
    assert all(list(found) == list(made) for found, made in zip(items, dicts, strict=True))
    one, other = items[0], items[1]
    # The program's own, which is found by its address.
    assert next(iter(one)) is next(iter(other)) is next(iter(one[3])) is "file"  # noqa: F632
    assert one["file"] is not other["file"]
    # A part takes the keys with it, and only its items.
    part = pickle.loads(pickle.dumps(items[2990:2980:-2]))
    assert part == dicts[2990:2980:-2] and part.nbytes < items.nbytes / 10
    # None of the keys is an item.
    assert len(items) == 3001 and len(part) == 5
    with pytest.raises(IndexError):
        items[3001]


def test_what_is_written_leaves_nothing_in_the_source():
    texts = ["é" * 100, "日本" * 50, {"ключ" * 10: 1}]
    before = [sys.getsizeof(text) for text in texts] + [sys.getsizeof(next(iter(texts[2])))]
    SharedList(texts)
    assert [sys.getsizeof(text) for text in texts] + [sys.getsizeof(next(iter(texts[2])))] == before


class Doubled(SharedList):
    def __getitem__(self, key):
        return super().__getitem__(key) * 2


def test_a_subclass_with_a_look_of_its_own():
    items = Doubled(["a", "b"])
    items.note = "kept"
    assert (
        items[0] == "aa"
        and list(items) == ["aa", "bb"]
        and "bb" in items
        and list(reversed(items)) == ["bb", "aa"]
    )
    again = pickle.loads(pickle.dumps(items))
    assert again.note == "kept" and again[1] == "bb"


def test_it_is_a_sequence_for_c_code_too():
    items = SharedList([1, "x", {2}])
    at = [operator.itemgetter(-1)(items), *map(items.__getitem__, [0, -2])]
    assert at == [{2}, 1, "x"]
    getitem = ctypes.pythonapi.PySequence_GetItem
    getitem.restype, getitem.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_ssize_t]
    assert getitem(items, 1) == "x" and getitem(items, -1) == {2}
    with pytest.raises(IndexError, match="list index out of range"):
        getitem(items, 3)
    with pytest.raises(TypeError):
        type(items).__mro__[1].__getitem__([1], 0)
    first, *rest = items
    assert (first, rest) == (1, ["x", {2}])


def test_threads_that_read_at_once_have_the_keys():
    for _ in range(20):
        items = SharedList({"first": number, "second": "x"} for number in range(50))
        barrier = threading.Barrier(4)

        def read(items=items, barrier=barrier):
            barrier.wait()
            return list(items)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: read(), range(4)))
        assert found == [[{"first": number, "second": "x"} for number in range(50)]] * 4


class Text(str):
    pass


def test_a_subclass_of_a_plain_type_stays_one():
    assert type(SharedList([Text("x")])[0]) is Text


@pytest.mark.parametrize(
    "key", [slice(None), slice(2, 9), slice(None, None, -1), slice(50, 3, -4), slice(5, 2), slice(-7, 400, 3)]
)
def test_a_slice_is_a_list_over_the_same_memory(key):
    numbers = list(range(30))
    items = SharedList(numbers)
    part = items[key]
    assert type(part) is SharedList and list(part) == numbers[key] and part.nbytes == items.nbytes
    assert list(part[1:-1][::-2]) == numbers[key][1:-1][::-2]
    assert list(pickle.loads(pickle.dumps(part))) == numbers[key]
    assert len(pickle.dumps(items[:2])) < len(pickle.dumps(items))


def test_it_is_a_sequence_as_a_list_is():
    words = ["a", "b", "a", "c"]
    items = SharedList(words)
    assert "b" in items and "d" not in items and items.count("a") == 2 and items.index("a", 1) == 2
    assert list(reversed(items)) == words[::-1]
    assert items == words and words == items and items == SharedList(words) and items != words[:3]
    assert items != tuple(words) and (items == 3) is False
    assert repr(items) == f"SharedList(['a', 'b', 'a', ...], len=4, nbytes={items.nbytes})"
    assert SharedList() == [] and not SharedList([])
    with pytest.raises(TypeError, match="unhashable"):
        hash(items)
    with pytest.raises(TypeError):
        items[0] = "x"


@pytest.mark.parametrize("key", [4, -5, 2**70, -(2**70), "a", 1.5, None])
def test_a_wrong_index_is_an_error_of_a_lists_type(key):
    words = ["a", "b", "a", "c"]
    with pytest.raises((IndexError, TypeError)) as expected:
        words[key]
    with pytest.raises(expected.type) as found:
        SharedList(words)[key]
    assert expected.type is TypeError or str(found.value) == str(expected.value)


def test_what_has_an_index_is_one():
    assert SharedList("abc")[np.int64(1)] == "b" and SharedList("abc")[True] == "b"
    assert SharedList("abc")[torch.tensor(-1)] == "c"


def test_an_item_that_cannot_be_pickled_is_named():
    with pytest.raises(pickle.PicklingError, match="item 2 of the list, of type lock, cannot be pickled"):
        SharedList([1, 2, threading.Lock()])
    with pytest.raises(ZeroDivisionError):
        SharedList(1 // (2 - number) for number in range(3))
    with pytest.raises(TypeError, match="not iterable"):
        SharedList(3)


def shared_bytes(process="self"):
    """Private and shared bytes, each shared page in equal parts."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:] if "kB" in line}


def test_it_is_built_in_a_stream():
    gc.collect()
    before = shared_bytes()["Anonymous"]
    highest = before

    def numbers():
        nonlocal highest
        for number in range(400):
            if number % 50 == 0:
                highest = max(highest, shared_bytes()["Anonymous"])
            yield bytes([number % 256]) * 200_000

    items = SharedList(numbers())
    assert items.nbytes >= 80_000_000
    assert highest - before < 20_000_000
    assert items[399] == bytes([399 % 256]) * 200_000


def open_descriptors():
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            names.append(str(entry.readlink()))
    return names


def test_memory_goes_with_its_last_holder():
    items = SharedList(["x"])
    part = items[:1]
    assert sum("ringloader-items" in name for name in open_descriptors()) == 1
    del items
    assert part[0] == "x"
    del part
    gc.collect()
    assert not any("ringloader-items" in name for name in open_descriptors())
    assert "ringloader-items" not in Path("/proc/self/maps").read_text()


def test_a_copy_is_the_same_and_a_pickle_has_the_bytes():
    items = SharedList(ITEMS)
    assert copy.copy(items) is items and copy.deepcopy(items) is items
    again = pickle.loads(pickle.dumps(items))
    assert all(map(same, again, ITEMS)) and not again.is_same(items)


class Kind(SharedList):
    pass


def read_in_child(items, pipe):
    pipe.send((type(items), list(items), len(pickle.dumps(items)), os.fstat(items.fileno()).st_ino))


def test_text_that_is_corrupt_is_an_error_and_no_text():
    pickled = pickle.dumps(SharedList(["whole", {"name": "marked text"}]))
    corrupt = pickle.loads(pickled.replace(b"marked", b"\xff" * 6))
    assert corrupt[0] == "whole"
    with pytest.raises(RuntimeError, match="corrupt: text is not UTF-8"):
        corrupt[1]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_is_started_gets_the_descriptor(method):
    context = multiprocessing.get_context(method)
    items = Kind(["one", {"two": 2}, "three"] * 2)
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_child, args=(items[::-2], theirs))
    child.start()
    assert ours.poll(60)
    kind, found, _, inode = ours.recv()
    child.join(60)
    assert (kind, found) == (Kind, list(items)[::-2])
    assert inode == os.fstat(items.fileno()).st_ino, "the memory is another"


SHARES = """
    from data.test_shared_list import shared_bytes
    from ringloader import SharedList

    class Captions(torch.utils.data.Dataset):
        def __init__(self, items):
            self.items = items

        def __len__(self):
            return 40

        def __getitem__(self, index):
            # All of it, as an epoch reads it.
            for number in range(index, len(self.items), 40):
                assert self.items[number].startswith(str(number))
            return torch.tensor([os.getpid(), index])

    def used_by(items):
        loader = DataLoader(
            Captions(items), num_workers=4, batch_size=None,
            multiprocessing_context=METHOD, persistent_workers=True,
        )
        for _ in range(2):
            rows = [row.tolist() for row in loader]
        assert [index for _, index in rows] == list(range(40))
        pids = {pid for pid, _ in rows}
        assert len(pids) == 4
        used = sum(shared_bytes(pid)["Pss"] for pid in [*pids, "self"])
        loader.shutdown()
        return used

    if __name__ == "__main__":
        # A collection writes to the page of every object, which a forked worker then has for itself.
        gc.freeze()
        gc.disable()
        items = SharedList(f"{number} {'x' * 200}" for number in range(100_000))
        reference = used_by(SharedList(["0"]))
        print(items.nbytes, used_by(items) - reference)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_the_memory(method, tmp_path):
    ended = run_script("ringloader", f"METHOD = {method!r}\n" + textwrap.dedent(SHARES), tmp_path)
    assert ended.code == 0, ended.err
    nbytes, used = map(int, ended.out.split())
    # Each of the workers that copies would add all of it.
    assert nbytes > 20_000_000
    assert used < 1.5 * nbytes


def test_index_says_what_is_missing():
    numbers = SharedList([3, 5, 7, 5])
    assert (numbers.index(5), numbers.index(5, 2), numbers.index(7, -3)) == (1, 3, 2)
    with pytest.raises(ValueError, match="99 is not in list"):
        numbers.index(99)
    with pytest.raises(ValueError, match="3 is not in list"):
        numbers.index(3, 1, 3)
