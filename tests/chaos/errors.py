"""Errors of datasets, collate functions and samplers, and samples that cannot be sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from chaos.case import Program, case, must
from chaos.data import Numbers, Raises, Returns, Stream, check_all, identity


class NeedsArguments(Exception):  # noqa: N818
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = lambda: None


class NoText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ReduceRaises(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        raise TypeError("cannot be reduced")


def _local() -> Exception:
    class OfAFunction(Exception):  # noqa: N818
        pass

    return OfAFunction("of a local class")


def _group() -> Exception:
    return ExceptionGroup("several", [ValueError("the first"), OSError(5, "the second")])


def _noted() -> Exception:
    error = ValueError("noted")
    error.add_note("what the note says")
    return error


def _caused() -> Exception:
    error = ValueError("the outer one")
    error.__cause__ = LookupError("the inner one")
    return error


# Name, what makes it, and the texts that must arrive.
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "value_error": (lambda: ValueError("a plain one"), ("ValueError", "a plain one")),
    "key_error": (lambda: KeyError("a\nkey"), ("KeyError",)),
    "needs_arguments": (lambda: NeedsArguments(7, reason="because"), ("NeedsArguments", "7: because")),
    "unpicklable": (lambda: Unpicklable("holds a lambda"), ("Unpicklable", "holds a lambda")),
    "reduce_raises": (lambda: ReduceRaises("not sent"), ("ReduceRaises", "not sent")),
    "no_text": (NoText, ("NoText",)),
    "local_class": (_local, ("OfAFunction", "of a local class")),
    "group": (_group, ("several", "ValueError", "the first", "the second")),
    "notes": (_noted, ("noted", "what the note says")),
    "cause": (_caused, ("the outer one", "LookupError", "the inner one")),
    "os_error": (lambda: FileNotFoundError(2, "No such file", "x.png"), ("No such file", "x.png")),
    "unicode_error": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ("UnicodeDecode", "bad")),
    "timeout_error": (lambda: TimeoutError("a late server"), ("TimeoutError", "a late server")),
    "memory_error": (lambda: MemoryError("no memory for it"), ("MemoryError", "no memory for it")),
    "huge_message": (lambda: ValueError("x" * 30_000_000 + "the end"), ("ValueError", "the end")),
}  # fmt: skip


def _kind(name: str) -> None:
    def arrives(program: Program) -> None:
        make, texts = KINDS[name]
        loader = program.loader(Raises(20, 5, make), num_workers=2)
        with program.raises(Exception, *texts, seconds=15):
            list(loader)

    texts = ", ".join(KINDS[name][1])
    arrives.__doc__ = f"The error arrives with its class, message, notes and causes: {texts}."
    fast = name == "local_class"
    case(name=f"raises_{name}", fast=fast)(arrives)


for _name in KINDS:
    _kind(_name)


@case(known=("wrong", "as torch: the error reaches the loop"))
def stop_iteration_of_a_sample(program: Program) -> None:
    """A dataset with `__getitem__` raises StopIteration: the epoch does not end as if it were complete."""
    loader = program.loader(Raises(20, 5, StopIteration), num_workers=2)
    try:
        count = len(list(loader))
    except Exception:
        return
    must(False, f"the epoch ended silently after {count} of 20 batches")


@case()
def system_exit_in_a_sample(program: Program) -> None:
    """A dataset calls `sys.exit`: an error, in seconds."""
    with program.raises(RuntimeError, "DataLoader worker", seconds=15):
        list(program.loader(Raises(20, 5, SystemExit), num_workers=2))


@case()
def keyboard_interrupt_in_a_sample(program: Program) -> None:
    """A dataset raises KeyboardInterrupt in its worker: an error, in seconds."""
    with program.raises(RuntimeError, "DataLoader worker", seconds=15):
        list(program.loader(Raises(20, 5, KeyboardInterrupt), num_workers=2))


class Recursive(Numbers):
    def __getitem__(self, index: int) -> Any:
        return self[index] if index == 5 else super().__getitem__(index)


@case()
def endless_recursion(program: Program) -> None:
    """A sample calls itself forever: RecursionError."""
    with program.raises(RecursionError, seconds=15):
        list(program.loader(Recursive(20), num_workers=2))


@case()
def loader_goes_on_after_an_error(program: Program) -> None:
    """After a sample's error, `next` gives the other batches of the epoch."""
    iterator = iter(program.loader(Raises(20, 5, ValueError), num_workers=2))
    numbers, errors = [], 0
    while True:
        try:
            numbers.append(int(next(iterator)[0, 0]))
        except ValueError:
            errors += 1
        except StopIteration:
            break
    must(errors == 1 and numbers == [n for n in range(20) if n != 5], f"{errors} errors, {numbers}")


def _lambda() -> Any:
    return lambda: None


class LoadRaises:
    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise ValueError("refuses to be loaded")


class SaveRaises:
    def __reduce__(self) -> Any:
        raise ValueError("refuses to be saved")


def _unsendable(program: Program, make: Any, text: str) -> None:
    dataset = Returns(20, 5, make)
    loader = program.loader(dataset, num_workers=2, batch_size=None, collate_fn=identity)
    with program.raises(Exception, text, seconds=15):
        list(loader)


@case(fast=True)
def sample_that_cannot_be_pickled(program: Program) -> None:
    """A sample holds a lambda: the error of pickle arrives, and nothing waits forever."""
    _unsendable(program, _lambda, "pickle|lambda")


@case()
def sample_whose_pickling_raises(program: Program) -> None:
    """The error arrives, and nothing waits forever."""
    _unsendable(program, SaveRaises, "refuses to be saved")


@case()
def sample_whose_loading_raises(program: Program) -> None:
    """The error arrives, and nothing waits forever."""
    _unsendable(program, LoadRaises, "refuses to be loaded")


class OpaqueIndex(int):
    def __reduce__(self) -> Any:
        raise TypeError("an index that cannot be sent")


@case()
def index_that_cannot_be_pickled(program: Program) -> None:
    """A sampler gives an index that cannot be pickled: the error arrives, and nothing waits forever."""
    loader = program.loader(Numbers(20), sampler=[0, 1, OpaqueIndex(2), 3], num_workers=1)
    with program.raises(TypeError, "cannot be sent", seconds=15):
        list(loader)


def _collate_raises(_samples: Any) -> Any:
    raise LookupError("no way to collate")


@case()
def collate_raises(program: Program) -> None:
    """The error arrives with its text."""
    with program.raises(LookupError, "no way to collate"):
        list(program.loader(Numbers(20), num_workers=2, collate_fn=_collate_raises))


class Ragged(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1)


@case()
def ragged_samples(program: Program) -> None:
    """Samples of different sizes: torch's error of `stack`."""
    with program.raises(RuntimeError, "stack expects each tensor to be equal size"):
        list(program.loader(Ragged(20), batch_size=4, num_workers=2))


class Breaks:
    """A sampler that breaks in the middle."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise LookupError("the sampler broke")

    def __len__(self) -> int:
        return 20


@case()
def sampler_raises(program: Program) -> None:
    """The error arrives, the workers end."""
    with program.raises(LookupError, "the sampler broke"):
        list(program.loader(Numbers(20), sampler=Breaks(), num_workers=2))


def _refuses(_worker: int) -> None:
    raise LookupError("the worker refuses")


@case()
def worker_init_fn_raises(program: Program) -> None:
    """The error arrives with its text."""
    with program.raises(LookupError, "the worker refuses"):
        list(program.loader(Numbers(20), num_workers=2, worker_init_fn=_refuses))


@case()
def stream_raises(program: Program) -> None:
    """An iterable dataset breaks in the middle: its error arrives."""
    with program.raises(LookupError, "the stream broke"):
        list(program.loader(Stream(20, 5), batch_size=2, num_workers=2))


class FewItems(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices[1:]]


@case()
def getitems_gives_too_few(program: Program) -> None:
    """`__getitems__` returns fewer samples than asked: the batches are smaller, or an error says so."""
    try:
        sizes = [len(batch) for batch in program.loader(FewItems(20), batch_size=4, num_workers=2)]
    except Exception as error:
        must(str(error), "an error without a text")
    else:
        must(sizes == [3] * 5, f"sizes {sizes}")


@case()
def warnings_are_errors(program: Program) -> None:
    """A program that makes each warning an error: an epoch comes."""
    import warnings

    warnings.simplefilter("error")
    check_all(program.loader(Numbers(20), num_workers=2), 20)


@case(methods=("spawn", "forkserver"))
def dataset_that_cannot_be_pickled(program: Program) -> None:
    """The error of pickle comes at the start, and nothing is left."""
    dataset = Numbers(20)
    dataset.held = lambda: None  # type: ignore[attr-defined]
    with program.raises(Exception, "pickle|lambda|local object", seconds=20):
        list(program.loader(dataset, num_workers=2))


class LoadsNowhere(Numbers):
    def __setstate__(self, state: Any) -> None:
        raise LookupError("cannot be loaded here")


@case(methods=("spawn",))
def dataset_that_cannot_be_loaded(program: Program) -> None:
    """A spawned worker cannot load its dataset: an error, in seconds."""
    with program.raises(RuntimeError, "DataLoader worker", seconds=30):
        list(program.loader(LoadsNowhere(20), num_workers=2))


@case()
def error_is_written_to_a_closed_stderr(program: Program) -> None:
    """Standard streams are closed: a sample's error arrives all the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    import os

    for number in range(3):
        os.close(number)
    with program.raises(ValueError, seconds=15):
        list(program.loader(Raises(20, 5, ValueError), num_workers=2))
