"""No memory is left while a batch arrives: `MemoryError`, or the batch; and those behind it come."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from parity import harness
from ringloader import DataLoader
from small_datasets import Made

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

# Each allocation of the interpreter fails once alone, and once with all that follow, in calls of `next` only.
PROGRAM = """
    import collections
    import gc
    import sys

    import _testcapi
    import numpy
    import torch

    from parity import harness
    from ringloader import DataLoader

    KIND, OPTIONS = sys.argv[1], eval(sys.argv[2])
    LENGTH = 100_000
    # So many batches in a row that come show that the allocations are through.
    ENOUGH = 25
    Pair = collections.namedtuple("Pair", "one two")


    class Own:
        def __init__(self, index):
            self.index, self.tensor = index, torch.full((3,), index)

        def __eq__(self, other):
            return self.index == other.index and torch.equal(self.tensor, other.tensor)


    def array(index, **flags):
        made = numpy.full((3, 4), index, **flags)
        made.flags.writeable = index % 2 == 0
        return made


    def views(index):
        tensor = torch.full((8, 2), index)
        return [tensor[:3], tensor, tensor[2:], torch.empty(0, 3)]


    MAKE = {
        "tensors": lambda index: {"one": torch.full((5000,), index), "two": [(torch.tensor(index),)]},
        "pairs": lambda index: Pair(torch.tensor(index), Pair(index, torch.full((9000,), index))),
        "views": views,
        "strings": lambda index: [f"text {index}", {f"key {index}": f"value {index}"}, (f"{index}" * 3000,)],
        "long": lambda index: [f"{index:06}" * 100_000, f"{index:06}".encode() * 100_000],
        "numbers": lambda index: [1000 + index, index / 7, (True, None, -(2**62) + index), b"few %d" % index],
        "set": lambda index: {f"text {index}", index / 7, 2**70 + index},
        "own": lambda index: [Own(index), torch.tensor(index)],
        "arrays": lambda index: [
            array(index), array(index, order="F"), numpy.array([f"{index}"]), numpy.empty((0, 2))
        ],
    }


    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            return MAKE[KIND](index)


    def as_it_is(sample):
        return sample


    def equal(one, two):
        if isinstance(one, torch.Tensor):
            return torch.equal(one, two)
        if isinstance(one, numpy.ndarray):
            return one.dtype == two.dtype and one.shape == two.shape and (one == two).all()
        if isinstance(one, dict):
            return list(one) == list(two) and all(map(equal, one.values(), two.values()))
        if isinstance(one, (list, tuple)):
            return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
        return type(one) is type(two) and one == two


    def is_no_memory(found):
        # Words of torch's for a tensor; of the interpreter's for a lock, a thread, and a frame.
        words = ["Failed to allocate a", "can't allocate lock", "can't start new thread"]
        words += ["without exception set", "without setting an exception"]
        theirs = isinstance(found, (RuntimeError, SystemError)) and any(text in str(found) for text in words)
        return theirs or isinstance(found, MemoryError)


    def failing(function):
        # While it runs, the allocations fail that `fails` says.
        def run(*arguments, **keywords):
            if fails is None:
                return function(*arguments, **keywords)
            _testcapi.set_nomemory(*fails)
            try:
                return function(*arguments, **keywords)
            finally:
                _testcapi.remove_mem_hooks()

        return run


    def attempt(start, stop):
        global fails
        fails = start, stop
        try:
            return step(iterator)
        except BaseException as error:
            return error
        finally:
            fails = None


    loader = DataLoader(Samples(), batch_size=None, collate_fn=as_it_is, num_workers=1,
                        multiprocessing_context="fork", **OPTIONS)
    gc.disable()
    fails, step = None, failing(next)
    for stops in (1, 0):
        # A new iterator counts from 0. Above 256 an int is an allocation, and each index that cannot be sent
        # leaves one batch less on its way: with none the epoch is over, as with torch.
        iterator = iter(loader)
        harness.assert_path(iterator, 1)
        for index in range(4):
            assert equal(next(iterator), MAKE[KIND](index)), index
        at, lost, start, came = 4, 0, 0, 0
        while came < ENOUGH:
            assert start < 5000, "the allocations have no end"
            found = attempt(start, start + 1 if stops else 0)
            start += 1
            if is_no_memory(found):
                lost, came = lost + 1, 0
                del found
                continue
            # A batch that raised may have been lost, or come after.
            expected = next((i for i in range(at, at + lost + 2) if equal(found, MAKE[KIND](i))), None)
            assert expected is not None, (start, at, lost, repr(found)[:300])
            at, lost, came = expected + 1, lost - (expected - at), came + 1
        assert at < 256, "ints are allocations"
        # A batch that the thread decoded before its turn may still have its error.
        first = None
        for _ in range(1 + OPTIONS.get("main_prefetch", 0)):
            try:
                first = next(iterator)
                break
            except MemoryError:
                lost += 1
        at = next(i for i in range(at, at + lost + 2) if equal(first, MAKE[KIND](i))) + 1
        for index in range(at, at + 20):
            assert equal(next(iterator), MAKE[KIND](index)), index
        del iterator
    print("allocations:", start)
"""


KINDS = ["tensors", "pairs", "views", "strings", "long", "numbers", "set", "own", "arrays"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            pytest.param(kind, {}, marks=() if kind in ("tensors", "arrays") else pytest.mark.slow)
            for kind in KINDS
        ),
        # A thread decodes them by the same code.
        *(
            pytest.param(kind, {"main_prefetch": 2}, marks=() if kind == "own" else pytest.mark.slow)
            for kind in KINDS
        ),
    ],
    ids=str,
)
def test_each_allocation_fails(kind, options):
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi, by which allocations fail")
    assert ran(PROGRAM, kind, repr(options)).startswith("allocations:")


# PyO3 makes the counters, and panics where the interpreter has no memory. The binding knows that by the text.
BY_PYO3 = """
    import _testcapi
    import ringloader._native as _native

    engine = _native.Engine(1, 8, 64 << 20)


    def counters(start):
        _testcapi.set_nomemory(start, start + 1)
        try:
            return engine.counters()
        finally:
            _testcapi.remove_mem_hooks()


    found = []
    for start in range(40):
        try:
            counters(start)
        except BaseException as error:
            found.append(type(error))
    assert set(found) == {MemoryError}, found
    print("allocations:", len(found))
"""


def test_a_panic_of_pyo3_without_memory_is_a_memory_error():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi, by which allocations fail")
    assert ran(BY_PYO3).startswith("allocations:")


LIMITED = """
    import gc
    import resource
    import sys

    import torch

    from parity import harness
    from ringloader import DataLoader

    MAKE = {
        "str": lambda index: f"{index}" * (100 << 20),
        "bytes": lambda index: f"{index}".encode() * (100 << 20),
        "list": lambda index: [f"{index}" * (100 << 20)],
        "set": lambda index: {f"{index}" * (100 << 20)},
        "strings": lambda index: [f"{index} {number}" for number in range(1 << 20)],
        "tuple": lambda index: tuple(range(1000 + index, (1 << 20) + index)),
        "tensor": lambda index: torch.full((100 << 20,), index, dtype=torch.uint8),
    }


    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return MAKE[sys.argv[1]](index)


    def as_it_is(sample):
        return sample


    loader = DataLoader(
        Samples(), batch_size=None, collate_fn=as_it_is, num_workers=1, prefetch_factor=1,
        multiprocessing_context="fork",
        max_shared_bytes=256 << 20,
    )
    iterator = iter(loader)
    harness.assert_path(iterator, 1)
    assert next(iterator) is not None
    while not iterator._transport.engine.committed():
        pass
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    # Enough for what came, and not for the objects that are made of it.
    room = {"bytes": 50, "strings": 32, "tuple": 8}.get(sys.argv[1], 150) << 20
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        found = next(iterator)
    except MemoryError as error:
        found = error.with_traceback(None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # A tensor lies where the worker wrote it.
    assert isinstance(found, MemoryError) or sys.argv[1] == "tensor", type(found)
    for index in (2, 3):
        found = next(iterator)
        assert found.eq(index).all() if sys.argv[1] == "tensor" else found == MAKE[sys.argv[1]](index)
    print("the rest came")
"""


@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("bytes", "list", "set", "str", "strings", "tuple")
        ),
    ],
)
def test_a_limit_of_address_space(kind):
    assert ran(LIMITED, kind) == "the rest came\n"


class Panics:
    """To unpickle it is a panic of native code: PyO3 goes on with one where Python raises its exception."""

    def __reduce__(self):
        return panic, ()


def panic():
    kinds = [kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException"]
    raise kinds[0]("planted")


def some_panic(index):
    return Panics() if index in (1, 2) else torch.full((9000,), index)


def as_it_is(sample):
    return sample


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"main_prefetch": 2}], ids=str)
def test_a_panic_is_an_error_of_its_batch(options, capfd):
    loader = DataLoader(Made(some_panic, 6), None, collate_fn=as_it_is, num_workers=1, timeout=20, **options)
    iterator = iter(loader)
    harness.assert_path(iterator, 1)
    found = []
    while len(found) < 7:
        try:
            found.append(int(next(iterator)[0]))
        except StopIteration:
            break
        except RuntimeError as error:
            found.append(str(error))
    lost = "ringloader's native code panicked: planted; please report this bug"
    assert found == [0, lost, lost, 3, 4, 5]
    assert "planted" in capfd.readouterr().err


def ran(program, *arguments):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        # A backtrace reads all symbols, for which there is no memory here.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]),
            "RUST_BACKTRACE": "0",
        },
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
