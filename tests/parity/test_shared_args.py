"""Arguments of workers are pickled once for all of them, and each has what torch's workers have."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from multiprocessing import reduction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import ringloader
from faults.proc import Snapshot, descriptors
from parity.side_by_side import assert_same

pytestmark = pytest.mark.limit(300)

METHODS = ["spawn", "forkserver"]
LARGE = 20_000


class Holding(Dataset):
    """Holds one of each kind, says what became of it in a worker, and writes to what it holds."""

    def __init__(self, context):
        whole = np.arange(LARGE * 2, dtype=np.float64)
        read_only = np.arange(LARGE)
        read_only.flags.writeable = False
        record = np.dtype([("a", "i4"), ("b", "f8")])
        self.arrays = {
            # Of an odd size, before the others.
            "bools": np.ones(100_001, bool),
            "whole": whole,
            "again": whole,
            "view": whole[5:-5],
            "strided": whole[::2],
            "column-major": np.asfortranarray(whole.reshape(200, -1)),
            "transposed": whole.reshape(200, -1).T,
            "3-d": whole.reshape(2, 100, -1).transpose(1, 0, 2),
            "read-only": read_only,
            "short": np.arange(5),
            "short read-only": np.frombuffer(b"abcdef", np.uint8),
            "empty": np.empty((0, 3)),
            "scalar": np.array(3.5),
            "objects": np.array([None, whole, "x"] * 10, dtype=object),
            "dates": np.arange(LARGE).astype("datetime64[s]"),
            "records": np.zeros(LARGE, record),
            "swapped": np.arange(LARGE, dtype=">i8"),
            "text": np.array(["abc"] * LARGE),
            "matrix": np.ones((300, 300)).view(np.matrix),
        }
        self.bytes = bytearray(200_000)
        self.tensor = torch.zeros(LARGE)
        self.part = self.tensor[10:20]
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.value = context.Value("i", 0)
        self.lock = context.Lock()
        self.queue = context.Queue()
        self.receiver, self.sender = context.Pipe(duplex=False)
        self.words = [str(number) for number in range(1000)]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def collate(self, samples):
        info = get_worker_info()
        told = [
            self is info.dataset,
            self.arrays["whole"] is self.arrays["again"],
            self.arrays["objects"][1] is self.arrays["whole"],
            self.part.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr(),
            [type(thing).__name__ for thing in (self.bytes, self.parameter, self.lock)],
            sum(map(len, self.words)),
            self.tensor.is_shared(),
        ]
        for name, array in self.arrays.items():
            flags = array.flags
            layout = [flags.writeable, flags.c_contiguous, flags.f_contiguous, flags.owndata, flags.aligned]
            told.append([name, array.shape, array.strides, str(array.dtype), type(array).__name__, *layout])
            told.append(str(array[:3] if array.ndim else array))
        if info.id == 0:
            # The worker's own copy; no other worker's batch may show it.
            for array in self.arrays.values():
                if array.dtype == np.float64 and array.flags.writeable:
                    array[...] = -1
            self.bytes[0] = 1
        told += [self.arrays["view"][0], self.arrays["column-major"][0, 0], self.bytes[0]]
        with self.lock, self.value.get_lock():
            self.value.value += 1
            self.tensor[info.id] += 1
            self.queue.put(info.id)
            self.sender.send(info.id)
        return told, samples


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_a_worker_has_what_torchs_has(loader_class, method):
    def scenario(kind, told):
        data = Holding(multiprocessing.get_context(method))
        loader = kind(
            data, batch_size=1, num_workers=2, multiprocessing_context=method, collate_fn=data.collate
        )
        told.iterate(loader)
        # The parent's: what is shared shows the workers' writes, the rest does not.
        told.step("tensor", lambda: data.tensor[:2].tolist())
        told.step("value", lambda: data.value.value)
        told.step("queue", lambda: sorted(data.queue.get() for _ in range(4)))
        told.step("pipe", lambda: sorted(data.receiver.recv() for _ in range(4)))
        told.step("array", lambda: data.arrays["whole"][:3].tolist())
        data.queue.close()

    steps = assert_same(scenario, loader_class)
    assert sum(step[0] == "next" for step in steps) == 5
    assert "4" in str(steps[-4][1]), steps[-4]


class Counted(Dataset):
    """Counts how often it is pickled."""

    def __init__(self, held=None):
        self.pickled = 0
        self.held = held

    def __getstate__(self):
        self.pickled += 1
        return dict(self.__dict__)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index, self.pickled


def pickled(kind, data):
    list(kind(data, num_workers=3, multiprocessing_context="forkserver"))
    return data.pickled


@pytest.mark.rings_only
def test_a_dataset_is_pickled_once(loader_class):
    assert [pickled(kind, Counted()) for kind in (DataLoader, loader_class)] == [3, 1]


class MakesATensor(Counted):
    """A dataset whose pickled tensor lives only while it is pickled."""

    def __getstate__(self):
        return {**super().__getstate__(), "held": torch.full((5,), 7)}

    def __getitem__(self, index):
        return self.held


@pytest.mark.rings_only
def test_a_tensor_that_is_made_for_pickling_lives_until_all_have_it(loader_class):
    loader = loader_class(MakesATensor(), num_workers=3, multiprocessing_context="forkserver")
    assert [batch.tolist() for batch in loader] == [[[7] * 5]] * 3


class Odd:
    """An object with a reduction for other processes, so it is unknown if it holds for more than one."""


def _reduce_odd(_odd):
    return Odd, ()


@pytest.mark.rings_only
@pytest.mark.parametrize("case", ["registered", "file_system", "asks for the process"])
def test_what_may_hold_for_one_process_is_pickled_for_each(loader_class, monkeypatch, case):
    held = None
    if case == "registered":
        monkeypatch.setitem(reduction.ForkingPickler._extra_reducers, Odd, _reduce_odd)
        held = Odd()
    elif case == "file_system":
        monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")
        held = torch.zeros(3)
    else:
        held = AsksForTheProcess()
    # Once more where it was tried together.
    assert pickled(loader_class, Counted(held)) in (3, 4)


class AsksForTheProcess:
    def __reduce__(self):
        assert multiprocessing.context.get_spawning_popen()._fds is not None
        return AsksForTheProcess, ()


class Remembering(Dataset):
    """Large, and tells which descriptors and how much memory its process holds."""

    def __init__(self):
        self.array = np.ones(1 << 20)
        self.tensor = torch.ones(10)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return _held()


def _held():
    return [target for target in descriptors().values() if "ringloader-arguments" in target]


@pytest.mark.rings_only
@pytest.mark.parametrize("persistent", [False, True])
def test_the_memory_goes_once_all_have_started(loader_class, persistent):
    data = Remembering()
    # Sent, it is shared with the parent for as long as it lives.
    data.tensor.share_memory_()
    loader = loader_class(
        data,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="forkserver",
        persistent_workers=persistent,
    )
    # The fork server, which the first of them starts, stays.
    list(loader_class([0], num_workers=1, multiprocessing_context="forkserver"))
    before = Snapshot.take()
    iterator = iter(loader)
    assert not _held()
    # In a worker: one, which the arrays' mapping holds.
    assert all(len(names) == 1 for names in iterator)
    del iterator, loader
    before.assert_nothing_left()


class Unpicklable(Dataset):
    def __init__(self):
        self.array = np.ones(LARGE)
        self.lines = (number for number in ())

    def __len__(self):
        return 1


@pytest.mark.rings_only
def test_the_memory_goes_when_pickling_fails(loader_class):
    loader = loader_class(Unpicklable(), num_workers=2, multiprocessing_context="forkserver")
    before = Snapshot.take()
    for _ in range(2):
        with pytest.raises((AttributeError, TypeError, reduction.pickle.PicklingError)) as caught:
            iter(loader)
        caught.value.__traceback__ = None
        del caught
        gc.collect()
        assert not _held()
    before.assert_nothing_left()


class RaisesInTheWorker(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index

    def __reduce__(self):
        return _raise, ()


def _raise():
    raise ZeroDivisionError("when unpickled")


def test_unpickling_fails_in_the_worker(loader_class, capfd):
    said = []

    def scenario(kind, told):
        loader = kind(RaisesInTheWorker(), num_workers=1, multiprocessing_context="spawn")
        told.iterate(loader, 1)
        gc.collect()
        said.append(capfd.readouterr().err.splitlines()[-1])

    assert_same(scenario, loader_class)
    assert said[0] == said[1] == "ZeroDivisionError: when unpickled"


def local_class():
    class Local(Dataset):
        def __init__(self):
            self.array = np.arange(LARGE)
            self.tensor = torch.arange(4)
            self.transform = lambda index: int(self.array[index] + self.tensor[index] + self.added)
            self.added = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.transform(index)

    return Local


def by_functions(kind, method, **options):
    """Batches, from a class of a function and lambdas."""

    def begin(_worker):
        get_worker_info().dataset.added = 10

    loader = kind(
        local_class()(),
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=lambda samples: samples[0] + 100,
        worker_init_fn=begin,
        **options,
    )
    return list(loader)


@pytest.mark.rings_only
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_what_pickle_cannot_send_goes_by_cloudpickle(loader_class, monkeypatch, method, strategy):
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)
    expected = by_functions(DataLoader, "fork")
    assert expected == [110, 112, 114, 116]
    assert by_functions(loader_class, method) == expected


@pytest.mark.rings_only
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_without_cloudpickle_a_note_names_it(loader_class, monkeypatch, strategy):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)
    caught = []
    for kind in (DataLoader, loader_class):
        with pytest.raises(Exception, match=r"pickle|local") as error:
            by_functions(kind, "forkserver")
        caught.append(error.value)
    theirs, ours = caught
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    # Python 3.14 says in notes of its own what it was serializing.
    (note,) = [note for note in ours.__notes__ if not note.startswith("when serializing")]
    assert "Local" in str(ours)
    assert "pip install cloudpickle" in note
    assert "multiprocessing_context='fork' or worker_method='thread'" in note


class Lines(Dataset):
    """Keeps a file open and seeks in it, as datasets over JSON lines do."""

    def __init__(self, path):
        self.file = path.open(encoding="utf-8")
        self.offsets = []
        while line := self.file.readline():
            self.offsets.append(self.file.tell() - len(line.encode()))

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, index):
        self.file.seek(self.offsets[index])
        return self.file.readline()


def lines(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"caf\u00e9{number}\n" for number in range(3)), encoding="utf-8")
    return Lines(path)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_an_open_file_is_torchs_error(loader_class, tmp_path, method):
    """cloudpickle would send its text, in which the offsets lead to other places."""
    for kind in (DataLoader, loader_class):
        with pytest.raises(TypeError, match=r"cannot pickle '_io\.TextIOWrapper' object"):
            list(kind(lines(tmp_path), num_workers=1, multiprocessing_context=method))


@pytest.mark.rings_only
def test_an_open_file_is_an_error_in_a_pool_too(tmp_path):
    with (
        ringloader.WorkerPool(1, "fork") as pool,
        pytest.raises(TypeError, match=r"cannot pickle '_io\.TextIOWrapper' object"),
    ):
        iter(ringloader.DataLoader(lines(tmp_path), worker_pool=pool))


@pytest.mark.rings_only
def test_functions_of_options_go_by_cloudpickle():
    def reset(dataset, _info, seeds):
        dataset.held = seeds.epoch

    loader = ringloader.DataLoader(
        CountedHeld(), num_workers=1, multiprocessing_context="forkserver", worker_reset_fn=reset
    )
    assert [[int(held) for held, _ in loader] for _ in range(2)] == [[0] * 3, [1] * 3]


class CountedHeld(Counted):
    def __getitem__(self, index):
        return self.held, self.pickled
