"""``on_error``: bad samples are skipped, replaced or asked for again, on every path, and listed."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import ringloader
from ringloader import DataLoader, Dispatch, Retry, WorkerPool
from ringloader.bad_samples import BadSample

pytestmark = pytest.mark.rings_only

PATHS = ["native", "threads", "without workers"]


@pytest.fixture(params=PATHS)
def path(request: Any) -> Iterator[str]:
    yield str(request.param)
    gc.collect()


def made(path: str, dataset: Any, **options: Any) -> DataLoader[Any]:
    workers = options.pop("workers", 2)
    if path == "threads":
        options["worker_method"] = "thread"
    return DataLoader(dataset, num_workers=0 if path == "without workers" else workers, **options)


class BadError(ValueError):
    """Cannot be made again of its text alone."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)
        self.index = index


class Some(Dataset[torch.Tensor]):
    """Samples at some indices are bad."""

    def __init__(self, length: int, *bad: int) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise BadError(index, "truncated")
        return torch.full((1000,), index)


class SomeAtOnce(Some):
    """The samples, with torch's ``__getitems__`` too."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def numbers(loader: Any) -> list[list[int]]:
    held = list(loader)
    for batch in held:
        assert bool((batch == batch[..., :1]).all()), "bytes of another sample"
    return [batch[..., 0].reshape(-1).tolist() for batch in held]


def listed(loader: Any) -> list[tuple[Any, int | None, str]]:
    return [(bad.index, bad.worker_id, bad.handling) for bad in loader.errors]


def worker_of(path: str, batch: int) -> int | None:
    return None if path == "without workers" else batch % 2


@pytest.mark.parametrize("kind", [Some, SomeAtOnce])
def test_skipped_samples_are_left_out(path: str, kind: type[Some]) -> None:
    loader = made(path, kind(12, 1, 4, 5, 6, 7, 11), batch_size=4, on_error="skip")
    assert ringloader.DataLoader.errors is not None
    for _ in range(2):
        assert numbers(loader) == [[0, 2, 3], [8, 9, 10]], "the second batch has nothing left"
        expected = [(1, 0), *((index, 1) for index in (4, 5, 6, 7)), (11, 0)]
        assert listed(loader) == [(index, worker_of(path, batch), "skipped") for index, batch in expected]
    for bad in loader.errors:
        assert isinstance(bad, BadSample)
        assert type(bad.error) is BadError or "Caught BadError in DataLoader worker" in str(bad.error)
        assert "in __getitem__" in bad.traceback and f"BadError: ({bad.index}, 'truncated')" in bad.traceback
        assert bad.error.__traceback__ is None


def test_what_it_does_is_torchs_where_no_sample_is_bad(path: str) -> None:
    with_it = made(path, Some(10), batch_size=3, on_error="skip", shuffle=True)
    without = made(path, Some(10), batch_size=3, shuffle=True)
    torch.manual_seed(3)
    expected = numbers(without)
    torch.manual_seed(3)
    assert numbers(with_it) == expected
    assert with_it.errors == without.errors == []


def other(index: int, error: Exception) -> torch.Tensor:
    assert isinstance(error, BadError) and error.index == index
    assert (get_worker_info() is None) == (os.environ.get("WITHOUT_WORKERS") == "1")
    return torch.full((1000,), -index)


def test_a_function_replaces_them(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITHOUT_WORKERS", str(int(path == "without workers")))
    loader = made(path, Some(6, 1, 2), batch_size=2, on_error=other)
    assert numbers(loader) == [[0, -1], [-2, 3], [4, 5]]
    assert listed(loader) == [(1, worker_of(path, 0), "replaced"), (2, worker_of(path, 1), "replaced")]


def refuses(index: int, error: Exception) -> Any:
    raise LookupError(f"no other for {index}") from error


def test_what_that_function_raises_is_the_error_of_the_batch(path: str) -> None:
    loader = made(path, Some(6, 2), batch_size=2, on_error=refuses)
    batches = iter(loader)
    assert next(batches)[:, 0].tolist() == [0, 1]
    with pytest.raises(LookupError, match="no other for 2"):
        next(batches)
    assert next(batches)[:, 0].tolist() == [4, 5]


class Flaky(Some):
    """BadError samples are good at the third time."""

    def __init__(self, length: int, *bad: int) -> None:
        super().__init__(length, *bad)
        self.times: dict[int, int] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        self.times[index] = self.times.get(index, 0) + 1
        if self.times[index] >= 3:
            return torch.full((1000,), index)
        return super().__getitem__(index)


def test_a_retry_asks_again(path: str) -> None:
    loader = made(path, Flaky(6, 1, 4), batch_size=2, on_error=Retry(2, 0.01, "skip"), max_errors=0)
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5]]
    assert listed(loader) == [(1, worker_of(path, 0), "retried"), (4, worker_of(path, 2), "retried")]


@pytest.mark.parametrize("then", ["raise", "skip", other])
def test_what_a_retry_does_in_the_end(path: str, then: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITHOUT_WORKERS", str(int(path == "without workers")))
    loader = made(path, Flaky(4, 1), batch_size=2, on_error=Retry(1, backoff=0, then=then))
    if then == "raise":
        with pytest.raises(Exception, match="truncated"):
            numbers(loader)
        assert loader.errors == []
    else:
        assert numbers(loader) == [[0] if then == "skip" else [0, -1], [2, 3]]
        assert listed(loader) == [(1, worker_of(path, 0), "skipped" if then == "skip" else "replaced")]


def test_pauses_grow() -> None:
    begun = time.monotonic()
    with pytest.raises(BadError):
        numbers(DataLoader(Some(1, 0), on_error=Retry(3, backoff=0.05)))
    assert time.monotonic() - begun >= 0.05 + 0.1 + 0.2


def test_one_too_many_is_raised(path: str) -> None:
    loader = made(path, Some(8, 1, 3, 5), batch_size=2, on_error="skip", max_errors=2)
    batches = iter(loader)
    assert [next(batches)[:, 0].tolist() for _ in range(2)] == [[0], [2]]
    with pytest.raises(Exception, match=r"truncated") as raised:
        next(batches)
    assert raised.value.__notes__[-1] == "max_errors=2 is exceeded: bad sample 3 of this epoch"
    if path != "without workers":
        assert "Caught BadError in DataLoader worker" in str(raised.value), "torch's words"
    assert next(batches)[:, 0].tolist() == [6, 7], "the caller may go on"
    assert [bad.index for bad in loader.errors] == [1, 3, 5]


def test_an_epoch_of_which_nothing_is_left_raises(path: str) -> None:
    loader = made(path, Some(5, *range(5)), batch_size=2, on_error="skip")
    with pytest.raises(Exception, match="truncated") as raised:
        numbers(loader)
    assert "on_error: nothing is left of the epoch, whose samples were all bad" in raised.value.__notes__
    assert len(loader.errors) == 5


def test_an_empty_dataset_has_no_bad_samples(path: str) -> None:
    assert numbers(made(path, Some(0), batch_size=2, on_error="skip")) == []


def test_single_samples_without_batches(path: str) -> None:
    loader = made(path, Some(5, 0, 3), batch_size=None, on_error="skip")
    assert numbers(loader) == [[1], [2], [4]]
    assert [bad.index for bad in loader.errors] == [0, 3]


def collate_even(samples: list[torch.Tensor]) -> torch.Tensor:
    if any(sample[0] == 3 for sample in samples):
        raise RuntimeError("no batch of these")
    return torch.stack(samples)


def test_where_collation_raises_all_of_the_batch_goes(path: str) -> None:
    loader = made(path, Some(6, 5), batch_size=2, collate_fn=collate_even, on_error="skip")
    assert numbers(loader) == [[0, 1], [4]]
    assert [bad.index for bad in loader.errors] == [[2, 3], 5]
    assert type(loader.errors[0].error) is RuntimeError and "no batch of these" in str(loader.errors[0].error)
    loader = made(path, Some(4), batch_size=2, collate_fn=collate_even, on_error=other)
    with pytest.raises(RuntimeError, match="no batch of these"):
        numbers(loader)


class Stream(IterableDataset[torch.Tensor]):
    """Goes on after an error. Each of two workers has every other number."""

    def __init__(self, length: int, *bad: int) -> None:
        self.length = length
        self.bad = bad

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(Numbered(iter(range(first, self.length, step)), self.bad))


class Numbered:
    def __init__(self, numbers: Iterator[int], bad: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.bad = bad

    def __iter__(self) -> Numbered:
        return self

    def __next__(self) -> torch.Tensor:
        number = next(self.numbers)
        if number in self.bad:
            raise BadError(number, "truncated")
        return torch.full((1000,), number)


def test_an_iterable_dataset_goes_on(path: str) -> None:
    loader = made(path, Stream(10, 2, 4, 9), batch_size=2, on_error="skip")
    if path == "without workers":
        assert numbers(loader) == [[0, 1], [3], [5], [6, 7], [8]]
        assert listed(loader) == [(index, None, "skipped") for index in (2, 4, 9)]
    else:
        assert numbers(loader) == [[0], [1, 3], [6], [5, 7], [8]]
        assert sorted(listed(loader)) == [(1, 0, "skipped"), (2, 0, "skipped"), (4, 1, "skipped")]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_of_an_iterable_dataset(path: str, drop_last: bool) -> None:
    loader = made(path, Stream(5, 4), batch_size=2, drop_last=drop_last, on_error="skip", workers=1)
    assert numbers(loader) == [[0, 1], [2, 3]]
    assert [bad.index for bad in loader.errors] == [4]
    loader = made(path, Stream(5, 3), batch_size=3, drop_last=drop_last, on_error="skip", workers=1)
    assert numbers(loader) == ([[0, 1, 2]] if drop_last else [[0, 1, 2], [4]])
    assert [bad.index for bad in loader.errors] == [3]


class Generates(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(Some(self.length, *self.bad).__getitem__, range(self.length))


def test_a_generator_that_raised_is_not_taken_for_one_that_has_ended(path: str) -> None:
    loader = made(path, Generates(6, 3), batch_size=2, on_error="skip", workers=1)
    batches = iter(loader)
    assert next(batches)[:, 0].tolist() == [0, 1]
    assert next(batches)[:, 0].tolist() == [2]
    with pytest.raises(Exception, match="truncated") as raised:
        next(batches)
    said = str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    assert "an error ends a generator" in said, "in the worker's traceback, or as a note"
    with pytest.raises(StopIteration):
        next(batches)


class AlwaysRaises:
    def __iter__(self) -> AlwaysRaises:
        return self

    def __next__(self) -> int:
        raise BadError(0, "truncated")


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(AlwaysRaises())


def test_an_iterator_that_only_raises_ends_nevertheless(path: str) -> None:
    with pytest.raises(Exception, match="truncated"):
        numbers(made(path, Broken(), batch_size=8, on_error="skip"))


@pytest.mark.parametrize("length", [6, 7])
def test_persistent_workers_list_each_epochs(length: int) -> None:
    options: Any = {"num_workers": 2, "persistent_workers": True, "on_error": "skip", "max_errors": 2}
    loader = DataLoader(Some(length, 2, 5), batch_size=2, **options)
    for _ in range(3):
        batches = iter(loader)
        assert loader.errors == []
        next(batches), next(batches)
        assert [bad.index for bad in loader.errors] == [2], "an abandoned epoch"
        assert list(itertools.chain(*numbers(loader))) == [at for at in range(length) if at not in (2, 5)]
        assert [bad.index for bad in loader.errors] == [2, 5]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("on_error", ["skip", other])
def test_start_methods(method: str, on_error: Any) -> None:
    loader = DataLoader(
        Some(6, 3), batch_size=2, num_workers=1, multiprocessing_context=method, on_error=on_error
    )
    assert numbers(loader) == [[0, 1], [2] if on_error == "skip" else [2, -3], [4, 5]]


def test_pools() -> None:
    with WorkerPool(1) as pool:
        loaders = [
            DataLoader(Some(6, 3), batch_size=2, worker_pool=pool, on_error=on_error)
            for on_error in ("skip", other)
        ]
        assert [numbers(loader)[1] for loader in loaders] == [[2], [2, -3]]


def test_arrays_are_gathered_all_the_same() -> None:
    dataset = TensorDataset(torch.arange(10))
    sampler = [[0, 1], [2, 77], [77], [8, 9]]
    for workers in (0, 2):
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, on_error="skip")
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2], [8, 9]]
        assert [bad.index for bad in loader.errors] == [77, 77]


def test_with_restarts_each_is_listed_once(tmp_path: Any) -> None:
    class Dies(Some):
        def __getitem__(self, index: int) -> torch.Tensor:
            mark = tmp_path / "died"
            if index == 5 and not mark.exists():
                mark.touch()
                os._exit(3)
            return super().__getitem__(index)

    loader = DataLoader(Dies(12, 1, 4, 7), batch_size=2, num_workers=2, on_error="skip", restart_workers=1)
    assert numbers(loader) == [[0], [2, 3], [5], [6], [8, 9], [10, 11]]
    assert [bad.index for bad in loader.errors] == [1, 4, 7]


def doubled(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


def test_a_transform_gets_the_batch(path: str) -> None:
    options = {"device": "cpu", "device_transform": doubled}
    loader = made(path, Some(4, 0, 1, 3), batch_size=2, on_error="skip", **options)
    assert numbers(loader) == [[4]]


def test_limits_count_batches_that_come() -> None:
    loader = DataLoader(Some(10, 0, 1), batch_size=1, num_workers=1, on_error="skip")
    batches = iter(loader)
    batches.limit(2)
    assert numbers(batches) == [[2], [3]]
    batches.resume()
    assert numbers(batches) == [[4], [5]]


def test_main_prefetch() -> None:
    loader = DataLoader(Some(6, 1, 2, 3), batch_size=2, num_workers=2, on_error="skip", main_prefetch=2)
    assert numbers(loader) == [[0], [4, 5]]


class Local(Some):
    """Raises errors that no pickle brings over."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.bad:
            return super().__getitem__(index)

        class LocalError(Exception):
            pass

        raise LocalError("in here", lambda: None)


def test_errors_that_cannot_be_pickled_are_listed_by_their_text() -> None:
    loader = DataLoader(Local(4, 1), batch_size=2, num_workers=1, on_error="skip")
    assert numbers(loader) == [[0], [2, 3]]
    (bad,) = loader.errors
    assert type(bad.error) is RuntimeError
    assert "Caught LocalError in DataLoader worker process 0" in str(bad.error)
    assert "LocalError: ('in here'" in bad.traceback


def test_the_log_says_it_once_and_then_seldom(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ringloader"):
        numbers(DataLoader(Some(40, *range(1, 30)), batch_size=4, on_error="skip"))
    said = [record.message for record in caplog.records if "on_error" in record.message]
    assert [text.split(" was ")[0] for text in said] == [
        f"ringloader: on_error: the sample at index {number}" for number in (1, 10)
    ]
    assert (
        "the sample at index 1 was skipped: BadError: (1, 'truncated') (bad samples of this epoch so far: 1; "
        "loader.errors lists them)"
    ) in said[0]


def test_nothing_of_a_bad_sample_is_kept_but_its_error() -> None:
    class Large(Some):
        def __getitem__(self, index: int) -> torch.Tensor:
            large = Weak(np.zeros(1000))
            alive.append(large.reference())
            return super().__getitem__(index)

    class Weak:
        def __init__(self, array: Any) -> None:
            self.array = array

        def reference(self) -> Any:
            import weakref

            return weakref.ref(self)

    alive: list[Any] = []
    for method in ({"num_workers": 0}, {"num_workers": 1, "worker_method": "thread"}):
        loader = DataLoader(Large(3, 1), batch_size=3, on_error="skip", **method)  # type: ignore[arg-type]
        assert numbers(loader) == [[0, 2]]
        assert len(alive) == 3 and len(loader.errors) == 1
        assert [reference() for reference in alive] == [None] * 3
        alive.clear()


def test_a_loader_with_an_attribute_of_that_name() -> None:
    class Counting(DataLoader[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.errors = 7
            super().__init__(*args, **options)

    loader = Counting(Some(4, 1), batch_size=2, on_error="skip")
    assert numbers(loader) == [[0], [2, 3]] and loader.errors == 7


def test_loaders_of_other_classes() -> None:
    torchs: Any = torch.utils.data.DataLoader(Some(4, 1), batch_size=2, num_workers=1)
    with ringloader.installed(on_error="skip"):
        assert numbers(torchs) == [[0], [2, 3]]
    converted = ringloader.convert(torchs, on_error=other)
    assert numbers(converted) == [[0, -1], [2, 3]]
    assert [bad.index for bad in converted.errors] == [1]
    with ringloader.installed(on_error="retry"):
        stream: Any = torch.utils.data.DataLoader(Stream(2), num_workers=1)
        assert numbers(stream) == [[0], [1]], "left aside"
        assert "on_error='retry' and an IterableDataset" in ringloader.report(stream).reason


def test_convert_to_torchs_handling_needs_no_other_option() -> None:
    loader = DataLoader(Some(4, 1), on_error="skip", max_errors=2)
    with pytest.raises(BadError):
        list(ringloader.convert(loader, on_error="raise"))
    with pytest.raises(ValueError, match="max_errors=2 has no effect"):
        ringloader.convert(DataLoader(Some(4, 1)), max_errors=2)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"on_error": "ignore"}, ValueError, r"on_error must be one of \('raise', .* not 'ignore'"),
        ({"on_error": 3}, TypeError, "on_error must be one of .*, not 3"),
        ({"on_error": None}, TypeError, "on_error must be one of .*, not None"),
        ({"max_errors": 3}, ValueError, "max_errors=3 has no effect with on_error='raise'"),
        (
            {"max_errors": 3, "on_error": "retry"},
            ValueError,
            "max_errors=3 has no effect with on_error='retry'",
        ),
        (
            {"max_errors": 3, "on_error": Retry(2)},
            ValueError,
            r"max_errors=3 has no effect with on_error=Retry\(",
        ),
        ({"on_error": Retry}, TypeError, r"not the class: pass ringloader.Retry\(\)"),
        (
            {"on_error": lambda _: 0},
            TypeError,
            "called with an index and an error, .* too many positional",
        ),
        ({"on_error": "skip", "max_errors": -1}, ValueError, "max_errors must be 0 or more, not -1"),
        ({"on_error": "skip", "max_errors": 1.5}, TypeError, "max_errors must be an int or None, not 1.5"),
        ({"on_error": "skip", "max_errors": True}, TypeError, "max_errors must be an int or None, not True"),
    ],
)
def test_wrong_arguments(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataLoader(Some(1), **options)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"times": 0}, ValueError),
        ({"times": 1.5}, TypeError),
        ({"backoff": -1}, ValueError),
        ({"backoff": float("inf")}, ValueError),
        ({"backoff": "1"}, TypeError),
        ({"then": "retry"}, ValueError),
        ({"then": lambda: 0}, TypeError),
        ({"then": None}, ValueError),
    ],
)
def test_wrong_retries(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Retry: "):
        Retry(**arguments)


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="on_error='retry' and an IterableDataset do not go together"):
        DataLoader(Stream(2), on_error="retry")
    with pytest.raises(ValueError, match="on_error='skip' and a Dispatch as dataset do not go together"):
        DataLoader(Dispatch(range(3)), on_error="skip")
