"""``on_error`` where datasets, samplers and programs do what is seldom done."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import ringloader
from ringloader import DataLoader, Dispatch, Retry

pytestmark = pytest.mark.rings_only

WORKERS = pytest.mark.parametrize("workers", [0, 1])


def listed(loader: Any) -> list[tuple[Any, str, str]]:
    return [(bad.index, str(bad.error), bad.handling) for bad in loader.errors]


class Some(Dataset[Any]):
    """Samples at some indices are bad."""

    def __init__(self, length: int, *bad: int) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"bad {index}")
        return index


class Modulo(Some):
    """Takes the indices of a batch as an array."""

    def __getitems__(self, indices: Any) -> list[int]:
        return [self[int(index)] for index in indices % self.length]


@WORKERS
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_getitems_is_given_what_the_sampler_gave(workers: int, make: Any) -> None:
    sampler = [make([1, 2, 103]), make([4, 55, 6])]
    plain = DataLoader(Modulo(50), batch_sampler=sampler, num_workers=workers)
    loader = DataLoader(Modulo(50), batch_sampler=sampler, num_workers=workers, on_error="skip")
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
    assert loader.errors == []
    loader = DataLoader(Modulo(50, 3, 5), batch_sampler=sampler, num_workers=workers, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[1, 2], [4, 6]]
    assert [(int(index), text) for index, text, _ in listed(loader)] == [(103, "bad 3"), (55, "bad 5")]


class Sliced(Dataset[Any]):
    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("torch asks for batches")

    def __getitems__(self, index: slice) -> Any:
        self.asked.append(index)
        if any(bad in range(8)[index] for bad in self.bad):
            raise OSError("bad slice")
        return torch.arange(8)[index]


class Columns(Dataset[Any]):
    """Batches are no lists of samples."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> Any:
        if 3 in indices:
            raise OSError("bad column")
        return {"x": torch.tensor(indices)}


def as_it_is(batch: Any) -> Any:
    return batch["x"] if isinstance(batch, dict) else batch


@WORKERS
@pytest.mark.parametrize("kind", [Sliced, Columns])
def test_a_batch_whose_samples_cannot_be_told_apart_is_one(workers: int, kind: Any) -> None:
    sampler: list[Any] = [[0, 1, 2, 3], [4, 5, 6, 7]]
    if kind is Sliced:
        sampler = [slice(0, 4), slice(4, 8)]
    options: dict[str, Any] = {"batch_sampler": sampler, "collate_fn": as_it_is, "num_workers": workers}
    dataset = Sliced(3) if kind is Sliced else Columns()
    loader = DataLoader(dataset, on_error="skip", **options)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7]]
    ((index, text, handling),) = listed(loader)
    assert (index, handling) == (sampler[0], "skipped")
    assert text == ("bad slice" if kind is Sliced else "bad column")
    with pytest.raises(OSError, match="bad"):
        list(DataLoader(dataset, on_error=lambda *_: pytest.fail("it gives samples"), **options))


class OnlyOne(Some):
    def __getitems__(self, indices: list[int]) -> list[int]:
        if len(indices) > 1:
            raise OSError("the batch is bad")
        return [self[index] for index in indices]


@WORKERS
def test_a_bad_batch_of_good_samples_is_listed(workers: int) -> None:
    loader = DataLoader(OnlyOne(4), 2, num_workers=workers, on_error="skip", max_errors=0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert listed(loader) == [
        ([0, 1], "the batch is bad", "retried"),
        ([2, 3], "the batch is bad", "retried"),
    ]


class Stream(IterableDataset[Any]):
    def __init__(self, iterator: Any, *args: Any) -> None:
        self.iterator = iterator
        self.args = args

    def __iter__(self) -> Iterator[Any]:
        return self.iterator(*self.args)  # type: ignore[no-any-return]


class Numbered:
    """An iterator that may be asked again."""

    def __init__(self, length: int, *bad: int) -> None:
        self.number = -1
        self.length = length
        self.bad = bad

    def __iter__(self) -> Numbered:
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number >= self.length:
            raise StopIteration
        if self.number in self.bad:
            raise OSError(f"bad {self.number}")
        return self.number


@WORKERS
@pytest.mark.parametrize("dataset", [Some(8, 3), Stream(Numbered, 8, 3)])
def test_a_function_that_raises_stop_iteration_ends_no_epoch(workers: int, dataset: Any) -> None:
    spares: Iterator[int] = iter([])
    loader = DataLoader(dataset, 2, num_workers=workers, on_error=lambda *_: next(spares))
    with pytest.raises(RuntimeError, match=r"raised StopIteration for sample 3"):
        list(loader)


class Parses(Numbered):
    """A generator of this call alone raises."""

    def __next__(self) -> int:
        self.number += 1
        if self.number >= self.length:
            raise StopIteration
        parsed = parse(self.number)
        return sum(self.checked(value) for value in parsed)

    def checked(self, value: int) -> int:
        if value in self.bad:
            raise OSError(f"bad {value}")
        return value


def parse(number: int) -> Iterator[int]:
    yield number


class Opens(Numbered):
    """A context manager that is a generator raises."""

    def __next__(self) -> int:
        self.number += 1
        if self.number >= self.length:
            raise StopIteration
        with opened(self.number in self.bad):
            return self.number


@contextlib.contextmanager
def opened(fails: bool) -> Iterator[None]:
    if fails:
        raise OSError("bad file")
    yield


class Kept(Numbered):
    """A generator that it keeps raises, and has ended by that."""

    def __init__(self, length: int, *bad: int) -> None:
        self.numbers = (number_of(number, bad) for number in range(length))

    def __next__(self) -> int:
        return next(self.numbers)


def number_of(number: int, bad: tuple[int, ...]) -> int:
    if number in bad:
        raise OSError(f"bad {number}")
    return number


@WORKERS
@pytest.mark.parametrize("kind", [Parses, Opens])
def test_generators_of_one_call_are_no_end(kind: Any, workers: int) -> None:
    # The last sample is bad: what follows is the end of the data.
    loader = DataLoader(Stream(kind, 5, 2, 4), 2, num_workers=workers, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1], [3]]
    assert [index for index, *_ in listed(loader)] == [2, 4]


@WORKERS
@pytest.mark.parametrize("wrap", [lambda numbers: numbers, lambda numbers: map(int, numbers)])
def test_a_generator_that_is_kept_is_one(workers: int, wrap: Any) -> None:
    loader = DataLoader(
        Stream(lambda: wrap(Kept(8, 5))), 2, num_workers=workers, on_error="skip", collate_fn=list
    )
    batches = iter(loader)
    found = [next(batches), next(batches), next(batches)]
    assert found == [[0, 1], [2, 3], [4]]
    with pytest.raises(OSError, match=r"bad 5") as raised:
        next(batches)
    said = str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    assert "an error ends a generator" in said


def read(shard: int, bad: set[int]) -> Iterator[int]:
    for number in range(10 * shard, 10 * shard + 10):
        if number in bad:
            raise OSError(f"bad {number}")
        yield number


class Shards:
    """Goes on with the next shard where one ends; ``is_wrapped``: knows the error as another."""

    def __init__(self, bad: set[int], is_wrapped: bool) -> None:
        self.shards = (read(shard, bad) for shard in range(3))
        self.now = next(self.shards)
        self.is_wrapped = is_wrapped

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> int:
        while True:
            try:
                return next(self.now)
            except StopIteration:
                self.now = next(self.shards)
            except OSError as error:
                if self.is_wrapped:
                    raise ValueError(f"wrapped: {error}") from error
                raise


SHARDS = {
    "chained": lambda bad: itertools.chain.from_iterable(read(shard, bad) for shard in range(3)),
    "an iterator's": lambda bad: Shards(bad, False),
    "an iterator's, wrapped": lambda bad: Shards(bad, True),
}


@WORKERS
@pytest.mark.parametrize("bad", [2, 10, 29])
@pytest.mark.parametrize("kind", SHARDS)
def test_the_rest_of_a_shard_is_not_lost_in_silence(kind: str, bad: int, workers: int) -> None:
    loader = DataLoader(
        Stream(lambda: SHARDS[kind]({bad})), 4, num_workers=workers, on_error="skip", collate_fn=list
    )
    found: list[int] = []
    with pytest.raises(Exception, match=f"bad {bad}") as raised:
        for batch in loader:
            found += batch
    assert found == list(range(len(found))) and len(found) <= bad
    said = str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    assert "an error ends a generator" in said


class Held(bytearray):
    __slots__ = ("__weakref__",)


class Counts(Dataset[Any]):
    """A sample is how many samples there are."""

    def __init__(self) -> None:
        self.there: list[weakref.ref[Held]] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        held = Held(8)
        self.there.append(weakref.ref(held))
        if index % 2:
            raise OSError("bad")
        return sum(one() is not None for one in self.there)


@WORKERS
@pytest.mark.parametrize("on_error", [Retry(2, 0.0, "skip"), Retry(1, 0.0, lambda *_: 1), "skip"])
def test_no_sample_is_kept(workers: int, on_error: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        found = torch.cat(list(DataLoader(Counts(), 4, num_workers=workers, on_error=on_error)))
    finally:
        gc.enable()
    assert set(found.tolist()) == {1}


def test_what_the_program_handles_stays_the_programs() -> None:
    class OwnError(Exception):
        pass

    def fails() -> None:
        raise OwnError

    loader = DataLoader(Some(4, 1), 2, on_error="skip")
    with pytest.raises(OwnError) as raised:
        try:
            fails()
        except OwnError:
            list(loader)
            raise
    assert "fails" in "".join(traceback.format_exception(raised.value))
    (bad,) = loader.errors
    assert bad.error.__context__ is None


class Caused(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        if index == 1:
            try:
                raise KeyError("its cause")
            except KeyError as error:
                raise OSError("bad") from error
        return index


class OwnCauses(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(number_or_error, range(3))


def number_or_error(number: int) -> int:
    if number == 1:
        error = OSError("bad")
        raise error from error
    return number


@WORKERS
def test_an_error_that_is_its_own_cause(workers: int) -> None:
    loader = DataLoader(OwnCauses(), None, num_workers=workers, on_error="skip")
    assert list(loader) == [0, 2]
    assert listed(loader) == [(1, "bad", "skipped")]


@WORKERS
def test_causes_are_kept_as_text_alone(workers: int) -> None:
    loader = DataLoader(Caused(), 1, on_error="skip", sampler=[0, 1], num_workers=workers)
    assert len(list(loader)) == 1
    (bad,) = loader.errors
    assert (type(bad.error), bad.error.args) == (OSError, ("bad",))
    assert (bad.error.__traceback__, bad.error.__context__, bad.error.__cause__) == (None, None, None)
    assert "KeyError: 'its cause'" in bad.traceback and "OSError: bad" in bad.traceback
    # Raised, it has that text.
    loader = DataLoader(Caused(), None, on_error="skip", sampler=[1], max_errors=0, num_workers=workers)
    with pytest.raises(OSError, match="bad") as raised:
        list(loader)
    assert raised.value.__traceback__ is not None
    (bad,) = loader.errors
    assert (type(bad.error), bad.error.args, bad.error.__traceback__) == (OSError, ("bad",), None)
    said = str(raised.value) + "".join(raised.value.__notes__)
    assert "KeyError: 'its cause'" in said and "max_errors=0" in said


@WORKERS
def test_what_a_reset_function_raises_is_raised(workers: int) -> None:
    def reset(*_: Any) -> None:
        raise LookupError("no epoch")

    loader = DataLoader(Some(4), num_workers=workers, on_error="skip", worker_reset_fn=reset)
    with pytest.raises(LookupError, match="no epoch"):
        list(loader)


class OnceBad(Some):
    def __getitem__(self, index: int) -> int:
        if index == 0 and 0 not in self.bad:
            self.bad = (0,)
            raise OSError("a blip")
        return index


def refuse(_: Any) -> Any:
    raise ValueError("collation is bad")


@WORKERS
def test_the_error_of_an_epoch_of_which_nothing_is_left(workers: int) -> None:
    loader = DataLoader(OnceBad(2), 2, num_workers=workers, on_error=Retry(1, 0.0, "skip"), collate_fn=refuse)
    with pytest.raises(ValueError, match="collation is bad"):
        list(loader)
    assert [handling for _, _, handling in listed(loader)] == ["retried", "skipped"]


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_the_error_names_the_worker_as_torchs_does(method: str) -> None:
    said = []
    for options in ({"on_error": "skip", "max_errors": 0}, {}):
        with pytest.raises(OSError, match="bad 1") as raised:
            list(DataLoader(Some(4, 1), 2, num_workers=1, worker_method=method, **options))  # type: ignore[arg-type]
        said.append(str(raised.value).splitlines()[0])
    assert said[0] == said[1]


def test_installed_for_all_loaders_it_leaves_a_dispatch_alone() -> None:
    ringloader.install(on_error="skip", restart_workers=2)
    try:
        loader = torch.utils.data.DataLoader(Dispatch(Stream(iter, range(8))), 2, num_workers=2)
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(8))
        assert "on_error" in str(ringloader.report(loader)) and "restart" in str(ringloader.report(loader))
        bad = torch.utils.data.DataLoader(Some(4, 1), 2, num_workers=1)
        assert [batch.tolist() for batch in bad] == [[0], [2, 3]]
    finally:
        ringloader.uninstall()


class BadAtFirst(Some):
    def __init__(self, times: int) -> None:
        super().__init__(1)
        self.times = times

    def __getitem__(self, index: int) -> int:
        self.times -= 1
        if self.times >= 0:
            raise OSError("bad")
        return os.getpid()


def test_as_many_retries_as_were_said() -> None:
    assert len(list(DataLoader(BadAtFirst(1500), on_error=Retry(1500, 0.0)))) == 1
    with pytest.raises(OSError, match="bad"):
        list(DataLoader(BadAtFirst(1501), on_error=Retry(1500, 0.0)))


def test_without_workers_the_fetcher_is_still_like_torchs() -> None:
    for dataset in (Some(4), Stream(iter, range(4))):
        iterator: Any = iter(DataLoader(dataset, on_error="skip"))
        assert iterator._dataset_fetcher.dataset is dataset
