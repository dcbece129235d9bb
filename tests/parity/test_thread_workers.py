"""``worker_method="thread"`` beside worker processes: batches, order, draws, errors."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._python_dispatch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, default_collate, get_worker_info

import ringloader
from parity.datasets import ERRORS, identity
from parity.describe import describe, difference, normalise
from ringloader import DataLoader
from ringloader._features import worker_info
from small_datasets import Made

pytestmark = pytest.mark.rings_only


def own_draws() -> dict[str, Any]:
    """One number of each generator that has torch's seed for the worker: a thread's own."""
    info = get_worker_info()
    assert info is not None
    rng = getattr(info, "rng", None)
    numbers = random_of(rng)
    return {"worker": info.id, "workers": info.num_workers, "seed": info.seed, **numbers}


def random_of(rng: Any) -> dict[str, Any]:
    import random

    if rng is None:
        return {"torch": torch.rand(2), "python": random.random()}
    return {"torch": torch.rand(2, generator=rng.torch_generator), "python": rng.random_generator.random()}


class Samples(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        kind = f"{type(index).__module__}.{type(index).__name__}"
        return {"index": index, "type": kind, "value": np.full(3, int(index)), **own_draws()}


class Together(Samples):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [self[index] | {"asked": type(indices).__name__, "of": len(indices)} for index in indices]


class Stream(IterableDataset[Any]):
    """Each worker yields as many as its number says."""

    def __init__(self, lengths: tuple[int, ...] = (7, 2, 4)) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for number in range(self.lengths[info.id]):
            yield {"number": number, **own_draws()}


class SizedStream(Stream):
    def __len__(self) -> int:
        return 5


class Failing(Samples):
    def __init__(self, error: str, bad: tuple[int, ...]) -> None:
        super().__init__(10)
        self.error = error
        self.bad = bad

    def __getitem__(self, index: Any) -> Any:
        if index in self.bad:
            make = ERRORS[self.error]
            raise ValueError("second") if make is None else make()
        return super().__getitem__(index)


class Reusing(BatchSampler):
    """Yields one list again and again."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Any:
        batch: list[int] = []
        for start in range(0, 12, 3):
            batch[:] = range(start, start + 3)
            yield batch

    def __len__(self) -> int:
        return 4


def init(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    info.dataset.length_seen = len(info.dataset)


def init_fails(worker_id: int) -> None:
    raise ValueError(f"no start of {worker_id}")


def failing_collate(samples: Any) -> Any:
    if samples[0]["index"] == 2:
        raise KeyError("collate")
    return default_collate(samples)


def told(error: BaseException) -> tuple[str, ...]:
    """Type and text, without the frame of the worker's loop and the word for what it is."""
    # Of some it is the `repr` of a text.
    text = normalise(str(error)).replace("worker process", "worker thread").replace("\\n", "\n")
    text = re.sub(r'  File "[^"]*", line \d+, in (_worker_loop|run)\n(    .*\n)+', "", text)
    return (f"{type(error).__module__}.{type(error).__qualname__}", text)


def outcomes(method: str, options: dict[str, Any], epochs: int = 1, take: int | None = None) -> list[Any]:
    """Returns what each ``next`` gives, with the state of the global generator after it."""
    torch.manual_seed(11)
    if "generator" in options:
        options["generator"].manual_seed(12)
    loader: Any = DataLoader(**options, worker_method=method)
    found: list[Any] = []
    for epoch in range(epochs):
        iterator = iter(loader)
        limit = None if epoch == epochs - 1 else take
        for _ in itertools.count() if limit is None else range(limit):
            try:
                found.append(("batch", describe(next(iterator))))
            except StopIteration as error:
                found.append(("end", str(error)[:40]))
                # That of a dataset goes on.
                if not error.args:
                    break
            except Exception as error:
                found.append(("error", *told(error)))
                error.__traceback__ = None
            found.append(("state", torch.get_rng_state().sum().item()))
            assert len(found) < 200
        assert (ringloader.report(iterator).path == "threads") == (method == "thread")
    return found


def assert_same(options: dict[str, Any], **how: Any) -> list[Any]:
    expected = outcomes("multiprocessing", options, **how)
    assert difference(expected, outcomes("thread", options, **how)) == ""
    return expected


MAP = [
    {"dataset": Samples(10), "batch_size": 3, "shuffle": True, "num_workers": 2},
    {"dataset": Samples(10), "batch_size": 3, "drop_last": True, "num_workers": 3, "prefetch_factor": 1},
    {"dataset": Samples(7), "batch_size": None, "num_workers": 2, "shuffle": True},
    {"dataset": Together(9), "batch_size": 2, "num_workers": 2},
    {"dataset": Samples(12), "batch_sampler": Reusing(), "num_workers": 2},
    {"dataset": Samples(6), "sampler": [np.int64(3), True, 2, 0], "batch_size": None, "num_workers": 2},
    {"dataset": Samples(6), "batch_size": 4, "collate_fn": identity, "num_workers": 1},
    {"dataset": Samples(6), "num_workers": 2, "worker_init_fn": init, "generator": torch.Generator()},
    {"dataset": Samples(0), "num_workers": 2},
    {"dataset": Samples(2), "num_workers": 3},
]
ITERABLE = [
    {"dataset": Stream(), "batch_size": 2, "num_workers": 3},
    {"dataset": Stream(), "batch_size": None, "num_workers": 3},
    {"dataset": Stream(), "batch_size": 3, "num_workers": 2, "drop_last": True},
    {"dataset": Stream((0, 0)), "batch_size": 3, "num_workers": 2},
]


@pytest.mark.parametrize("case", range(len(MAP) + len(ITERABLE)))
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_order_and_draws_are_those_of_processes(case, persistent):
    options = {**(MAP + ITERABLE)[case], "persistent_workers": persistent}
    assert_same(options, epochs=2)


@pytest.mark.parametrize("dataset", [Samples(20), Stream((9, 8))])
def test_epochs_that_are_given_up(dataset):
    options = {"dataset": dataset, "batch_size": 2, "num_workers": 2}
    assert_same(options, epochs=3, take=2)
    # Of persistent workers those of a process draw for what is thrown away, too: as many numbers as threads.
    assert_same({**options, "persistent_workers": True, "prefetch_factor": 1}, epochs=1)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("workers", [1, 2])
def test_errors_are_those_of_processes(error, workers):
    found = assert_same({"dataset": Failing(error, (1, 4, 9)), "batch_size": 2, "num_workers": workers})
    kinds = [kind for kind, *_ in found]
    assert kinds.count("batch") == 2 and kinds.count("error") + (error == "StopIteration") * 3 == 3


@pytest.mark.parametrize("fails", [{"worker_init_fn": init_fails}, {"collate_fn": failing_collate}])
def test_errors_of_other_functions(fails):
    assert_same({"dataset": Samples(6), "num_workers": 2, **fails})


def test_the_text_says_which_thread():
    loader = DataLoader(Failing("ValueError", (0,)), num_workers=1, worker_method="thread")
    with pytest.raises(ValueError, match=r"^Caught ValueError in DataLoader worker thread 0\.\nOriginal"):
        next(iter(loader))


@pytest.mark.parametrize("dataset", [Samples(12), Stream((5, 5))])
def test_out_of_order(dataset):
    def indices(method):
        loader = DataLoader(dataset, batch_size=2, num_workers=2, in_order=False, worker_method=method)
        return sorted(str(batch.get("index", batch.get("number"))) for batch in loader)

    assert indices("thread") == indices("multiprocessing")


def test_out_of_order_the_slow_do_not_hold_up_the_fast():
    released = threading.Event()

    class OneIsSlow(Samples):
        def __getitem__(self, index):
            if index == 0:
                assert released.wait(30)
            return index

    loader = DataLoader(OneIsSlow(4), batch_size=None, num_workers=2, in_order=False, worker_method="thread")
    iterator = iter(loader)
    assert [next(iterator) for _ in range(2)] == [1, 3]
    released.set()
    assert sorted(iterator) == [0, 2]


class Told(Dataset[Any]):
    """Samples of all that a worker can know of itself, by every way to ask."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info(), get_worker_info(), threading.current_thread(), self


def test_each_thread_has_its_worker_info():
    dataset = Told()
    loader = DataLoader(dataset, num_workers=2, batch_size=None, worker_method="thread", collate_fn=identity)
    infos = {}
    for info, same, thread, seen in loader:
        assert info is same and info.dataset is dataset is seen
        assert get_worker_info() is None, "this thread is no worker"
        assert infos.setdefault(info.id, (info, thread)) == (info, thread)
    assert sorted(infos) == [0, 1]
    for number, (info, thread) in infos.items():
        assert (info.num_workers, info.worker_method, thread.daemon) == (2, "thread", True)
        base = info.seed - number
        assert info.rng.torch_generator.initial_seed() == info.seed
        state = torch.utils.data._utils.worker._generate_state(base, number)
        assert info.rng.numpy_generator.random() == np.random.default_rng(state).random()
        with pytest.raises(Exception, match=r"(cannot assign to field|Cannot assign attributes|id)"):
            info.id = 3
    # Code that runs in another thread meanwhile is no worker either, and a process still is one.
    processes = DataLoader(Samples(4), num_workers=2)
    assert [batch["worker"].item() for batch in processes] == [0, 1, 0, 1]


@pytest.mark.skipif(not hasattr(torch, "thread_safe_generator"), reason="this torch has none")
def test_torchs_generator_of_the_thread():
    class Draws(Samples):
        def __getitem__(self, index):
            generator = torch.thread_safe_generator()
            return generator is get_worker_info().rng.torch_generator

    assert list(DataLoader(Draws(3), num_workers=1, batch_size=None, worker_method="thread")) == [True] * 3


class Globals(Samples):
    """Draws from the process's generators."""

    def __getitem__(self, index):
        return torch.rand(1).item(), torch.initial_seed()


def test_global_generators_are_the_processs():
    """In a process they are the worker's; in a thread they are everybody's, and are not seeded."""

    def draws(method):
        torch.manual_seed(3)
        loader = DataLoader(Globals(3), num_workers=1, batch_size=None, worker_method=method)
        return list(loader), torch.get_rng_state()

    processes, after_processes = draws("multiprocessing")
    threads, after_threads = draws("thread")
    assert {seed for _, seed in threads} == {3} and 3 not in {seed for _, seed in processes}
    assert not torch.equal(after_processes, after_threads), "the threads drew from this process's generator"
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    assert [number for number, _ in threads] == [torch.rand(1).item() for _ in range(3)]


class Kept(Dataset[Any]):
    """Samples that a process could not send, and one tensor that is filled again."""

    def __init__(self):
        self.lock = threading.Lock()
        self.tensor = torch.zeros(4)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.tensor.fill_(index)
        return self.tensor, self.lock


def test_a_batch_is_what_the_worker_made():
    dataset = Kept()
    loader = DataLoader(dataset, num_workers=1, batch_size=None, collate_fn=identity, worker_method="thread")
    batches = list(loader)
    assert all(tensor is dataset.tensor and lock is dataset.lock for tensor, lock in batches)
    assert dataset.tensor.tolist() == [2] * 4, "one tensor, and one dataset"


def make_tensors(index):
    return torch.full((5,), index), np.full(2, index), index


@pytest.mark.parametrize(
    ("collate", "allocations"), [(default_collate, 0), (lambda samples: [default_collate(samples)], 4)]
)
def test_collation_in_a_thread_takes_no_shared_memory(collate, allocations, monkeypatch):
    # Once for the process: what is put in place later, the end of this test would undo.
    worker_info.put_in_place()
    asked = []
    new_shared = torch.UntypedStorage._new_shared.__func__
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_new_shared",
        classmethod(lambda cls, size, **options: (asked.append(size), new_shared(cls, size, **options))[1]),
    )
    loader = DataLoader(
        Made(make_tensors, 8), num_workers=2, batch_size=4, collate_fn=collate, worker_method="thread"
    )
    for batch in loader:
        tensors = batch[0] if isinstance(batch[0], list) else batch
        assert len(tensors) == 3 and not any(tensor.is_shared() for tensor in tensors)
    # torch's own collation asks for it as in a process, and is given private memory.
    assert len(asked) == allocations or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    # Outside of a worker's thread it is what it was.
    assert torch.UntypedStorage._new_shared(16).is_shared()


def test_operators_use_one_thread_there_and_as_many_as_before_elsewhere():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:

        class Asks(Samples):
            def __getitem__(self, index):
                return torch.get_num_threads()

        assert list(DataLoader(Asks(4), num_workers=2, batch_size=None, worker_method="thread")) == [1] * 4
        found = [torch.get_num_threads()]
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_a_process_loader_in_a_threads_dataset_and_the_other_way_round():
    class Nested(Samples):
        def __init__(self, inner, outer):
            super().__init__(2)
            self.inner, self.outer = inner, outer

        def __getitem__(self, index):
            loader = DataLoader(Samples(3), num_workers=2, worker_method=self.inner)
            inner = [batch["worker"].item() for batch in loader]
            info = get_worker_info()
            return inner, info.id, getattr(info, "worker_method", None)

    for outer, inner in (("thread", "multiprocessing"), ("thread", "thread")):
        loader = DataLoader(
            Nested(inner, outer), num_workers=2, batch_size=None, collate_fn=identity, worker_method=outer
        )
        assert list(loader) == [([0, 1, 0], 0, "thread"), ([0, 1, 0], 1, "thread")]
    # A worker process may have threads, as it may have no processes.
    loader = DataLoader(Nested("thread", None), num_workers=2, batch_size=None, collate_fn=identity)
    assert [(inner, number) for inner, number, _ in loader] == [([0, 1, 0], 0), ([0, 1, 0], 1)]


def test_the_length_of_a_stream_is_watched():
    found = {}
    for method in ("multiprocessing", "thread"):
        loader = DataLoader(SizedStream((4, 4)), num_workers=2, batch_size=None, worker_method=method)
        len(loader)
        with pytest.warns(UserWarning) as caught:
            list(loader)
        # From 3.12 on, Python may have something to say of forks.
        theirs = (one for one in caught if one.category is UserWarning)
        found[method] = [(normalise(str(one.message)), one.filename) for one in theirs]
    assert found["thread"] == found["multiprocessing"] and found["thread"]


@pytest.mark.parametrize("make", [torch.utils.data.TensorDataset, ringloader.ArrayDataset])
def test_rows_of_arrays(make):
    """Rows of arrays are gathered natively, in a thread into memory of its own."""
    rows = torch.arange(60.0).reshape(20, 3)
    labels = torch.arange(20)

    def batches(method):
        torch.manual_seed(2)
        loader = DataLoader(
            make(rows, labels), batch_size=6, shuffle=True, num_workers=2, worker_method=method
        )
        return list(loader)

    found = batches("thread")
    assert describe(found) == describe(batches("multiprocessing"))
    found[0][0].zero_()
    assert rows[1:].min() > 0, "a batch has memory of its own"


V: contextvars.ContextVar[int] = contextvars.ContextVar("V", default=0)


class Doubling(torch.overrides.TorchFunctionMode):
    """Has a say in one function, and counts nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.full else made


class Negating(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return -made if func is torch.ops.aten.sin.default else made


class Modes(Samples):
    """Each sample is what torch and numpy make of the modes of the worker."""

    def __getitem__(self, index):
        half = torch.ones(2, 2, dtype=torch.float32)
        return {
            "grad": torch.is_grad_enabled(),
            "requires_grad": torch.ones(1, requires_grad=True).mul(2).requires_grad,
            "inference": torch.is_inference_mode_enabled(),
            "is_inference": torch.ones(1).is_inference(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "autocast dtype": str(torch.get_autocast_dtype("cpu")),
            "product": str((half @ half).dtype),
            "cache": torch.is_autocast_cache_enabled(),
            "dtype": str(torch.tensor(0.5).dtype),
            "device": str(torch.get_default_device()),
            "full": torch.full((1,), 3).item(),
            "sine": torch.sin(torch.ones(1)).item() > 0,
            "errstate": np.geterr()["divide"],
            "variable": V.get(),
        }


class SetsItsOwn(Modes):
    """Changes the modes of the worker."""

    def __getitem__(self, index):
        before = super().__getitem__(index)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        V.set(index + 20)
        return before, super().__getitem__(index)


@contextlib.contextmanager
def in_mode(name):
    with contextlib.ExitStack() as stack:
        if name in ("inference", "all"):
            stack.enter_context(torch.inference_mode())
        if name in ("no_grad", "set_grad"):
            stack.enter_context(torch.no_grad())
        if name in ("autocast", "all"):
            stack.enter_context(torch.autocast("cpu", dtype=torch.float16, cache_enabled=False))
        if name == "dtype":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        if name in ("with device", "all"):
            stack.enter_context(torch.device("cpu:0"))
        if name == "default device":
            stack.callback(torch.set_default_device, None)
            torch.set_default_device("cpu:0")
        if name == "function":
            stack.enter_context(Doubling())
        if name == "dispatch":
            stack.enter_context(Negating())
        if name in ("errstate", "all"):
            stack.enter_context(np.errstate(divide="raise"))
        if name in ("variable", "all"):
            stack.callback(V.reset, V.set(7))
        yield


def knows_its_default_device():
    """False in torch 2.6, whose ``get_default_device`` fails in a process that has once had another."""
    with torch.device("cpu:0"):
        return str(torch.get_default_device()) == "cpu:0"


MODES = ["none", "inference", "no_grad", "autocast", "errstate", "variable", "all"]
if knows_its_default_device():
    MODES += ["with device", "default device"]


@pytest.mark.parametrize("name", MODES)
def test_a_worker_has_the_modes_of_iter(name):
    """torch's forked workers have those of the thread that forks them, until they end."""
    datasets = (Modes, SetsItsOwn) if name in ("default device", "all") else (Modes,)

    def of(dataset, kind, **options):
        loader = kind(
            dataset(4),
            batch_size=None,
            num_workers=2,
            collate_fn=identity,
            persistent_workers=True,
            **options,
        )
        with in_mode(name):
            iterator = iter(loader)
            found = [next(iterator), next(iterator)]
        # Drawn outside, where the modes are gone; then in another epoch of the same workers.
        found += [*iterator, *loader]
        return found, len(torch.overrides._get_current_function_mode_stack()), V.get()

    for dataset in datasets:
        theirs = of(dataset, torch.utils.data.DataLoader, multiprocessing_context="fork")
        assert of(dataset, DataLoader, worker_method="thread") == theirs
    assert len(theirs[0]) == 8
    if len(datasets) == 1:
        assert all((sample == Modes(1)[0]) == (name == "none") for sample in theirs[0])


@pytest.mark.parametrize("name", ["function", "dispatch"])
def test_a_mode_of_the_callers_own_is_not_the_workers(name):
    def first(kind, **options):
        with in_mode(name):
            return next(iter(kind(Modes(2), batch_size=None, num_workers=1, collate_fn=identity, **options)))

    outside = Modes(1)[0]
    assert first(DataLoader, worker_method="thread") == outside
    assert first(torch.utils.data.DataLoader, multiprocessing_context="fork") != outside


def test_the_default_dtype_is_the_processs():
    """In torch too: a thread has none of its own. A forked worker keeps that of ``iter()``."""

    def dtypes(kind, **options):
        with in_mode("dtype"):
            iterator = iter(kind(Modes(6), batch_size=None, num_workers=1, prefetch_factor=1, **options))
            inside = next(iterator)["dtype"]
        return inside, [sample["dtype"] for sample in iterator][-1]

    processes = dtypes(torch.utils.data.DataLoader, multiprocessing_context="fork")
    assert processes == dtypes(DataLoader) == ("torch.float64", "torch.float64")
    assert dtypes(DataLoader, worker_method="thread") == ("torch.float64", "torch.float32")


def test_inference_tensors_arrive_as_the_worker_made_them():
    """A process's batch is made anew, in the modes of ``next``; a thread's is the object itself."""

    def arrives(kind, **options):
        with torch.inference_mode():
            iterator = iter(kind(torch.ones(4, 2), num_workers=1, **options))
        return next(iterator).is_inference()

    assert arrives(torch.utils.data.DataLoader) is arrives(DataLoader) is False
    assert arrives(DataLoader, worker_method="thread") is True
