"""Errors of workers arrive whole: name, message, notes, causes, traceback; where torch loses them too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import Dataset

from parity.describe import normalise
from ringloader import DataLoader, Dispatch

pytestmark = pytest.mark.rings_only


def local() -> BaseException:
    class LocalError(Exception):
        pass

    return LocalError("the message")


class TwoArgumentsError(Exception):
    def __init__(self, one: Any, other: Any) -> None:
        super().__init__(f"the message {one} {other}")


class HasMessageError(Exception):
    """With a `message` that is no argument."""

    message = "of the class"


class RefusesError(Exception):
    def __init__(self, *args: Any) -> None:
        if args and "Traceback" in str(args[0]):
            raise LookupError("the constructor")
        super().__init__(*args)


LOST = {
    "local": local,
    "group": lambda: ExceptionGroup("the message", [ValueError("one of it"), KeyError("another")]),
    "groups": lambda: ExceptionGroup(
        "the message", [ValueError("one of it"), ExceptionGroup("inner", [KeyError("another")])]
    ),
    "made a group": lambda: BaseExceptionGroup("the message", [ValueError("one of it")]),
    "message": lambda: HasMessageError("the message"),
}
KEPT = {
    "value": lambda: ValueError("the message"),
    "key": lambda: KeyError("the message"),
    "system": lambda: OSError(2, "the message"),
    "two arguments": lambda: TwoArgumentsError(1, 2),
    "refuses": lambda: RefusesError("the message"),
    "surrogate": lambda: ValueError("the message \udc80"),
    "long": lambda: ValueError("the message" + 1_000_000 * "x"),
}


class Raising(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        error = self.make()
        error.add_note("the note")
        try:
            raise ZeroDivisionError("the cause")
        except ZeroDivisionError as cause:
            raise error from cause


def raised(loader: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        next(iter(loader))
    return caught.value


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
@pytest.mark.parametrize("kind", LOST)
def test_what_torch_loses_arrives(kind, method):
    error = raised(DataLoader(Raising(LOST[kind]), num_workers=1, worker_method=method))
    name = type(LOST[kind]()).__name__
    if kind == "local" and method == "thread":
        assert type(error).__name__ == name
    else:
        assert type(error) is RuntimeError
    where = "worker thread" if method == "thread" else "worker process"
    assert str(error).startswith(f"Caught {name} in DataLoader {where} 0.\nOriginal ")
    for text in ("in __getitem__", "raise error from cause", "the message", "the note", "the cause"):
        assert text in str(error)
    if "group" in kind:
        assert "one of it" in str(error)
        # The error that torch makes of it: this test, and the row, go when that changes.
        theirs = raised(torch.utils.data.DataLoader(Raising(LOST[kind]), num_workers=1))
        assert type(theirs) is TypeError
        assert "the message" not in str(theirs)


@pytest.mark.parametrize("kind", KEPT)
def test_others_are_torchs(kind):
    ours, theirs = (
        raised(cls(Raising(KEPT[kind]), num_workers=1)) for cls in (DataLoader, torch.utils.data.DataLoader)
    )
    assert type(ours) is type(theirs)
    assert normalise(str(ours)) == normalise(str(theirs))
    assert "the note" in str(ours)


def test_the_next_batches_come():
    loader = DataLoader(Raising(local), num_workers=1)
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="LocalError"):
            next(iterator)
    assert next(iterator, None) is None


def fails(number: int) -> int:
    if number == 2:
        raise local()
    return number


def test_in_a_worker_init_fn_and_behind_a_dispatch():
    def init(_: int) -> None:
        raise local()

    error = raised(DataLoader([1, 2], num_workers=1, worker_init_fn=init))
    assert "LocalError: the message" in str(error)
    loader = DataLoader(Dispatch(range(4)).map(fails), batch_size=None, num_workers=1)
    found: list[Any] = []
    iterator = iter(loader)
    while len(found) < 4:
        try:
            found.append(next(iterator))
        except RuntimeError as error:
            found.append(str(error).splitlines()[-1])
    assert found == [0, 1, f"{__name__}.local.<locals>.LocalError: the message", 3]


def test_a_source_whose_error_cannot_be_sent():
    class Source:
        def __iter__(self) -> Any:
            yield 1
            raise local()

    iterator = iter(DataLoader(Dispatch(Source()), batch_size=None, num_workers=1))
    assert next(iterator) == 1
    with pytest.raises(RuntimeError, match=r"Caught LocalError in the dispatching process(?s:.*)the message"):
        next(iterator)


def test_what_a_call_raises():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    list(loader)
    with pytest.raises(RuntimeError, match=r"LocalError(?s:.*)the message"):
        loader.call_workers(functools.partial(raise_local))
    loader.shutdown()


def raise_local(_dataset: Any) -> None:
    raise local()
