"""One input through two loaders, with everything a program could notice written down after every step."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from parity.describe import Description, describe, difference, digest, normalise, tensor_bytes
from ringloader._torch import internals

LoaderClass = type[torch.utils.data.DataLoader[Any]]

# Paths of loaders with worker processes that parity tests compare with torch.
PATHS = ("native",)
# Native scheduling, with batches taken ahead of their turn.
AHEAD = "ahead"
# torch's own loader, on systems where ringloader has no workers.
TORCHS = "torch"
# Paths that are compared with torch, by the option --path; the first is the default outside of `taking`.
paths: tuple[str, ...] = PATHS
# The path that a loader with workers takes now; another would compare torch with torch.
expected_path = PATHS[0]

# Workers of which torch warns, as they are more than the cores of this process.
TOO_MANY = 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

# Python's remark about forks of a process with threads, what torch says once and never again, and what the
# pinning thread of 2.6 says when it comes to it.
ONCE_PER_PROCESS = (
    "use of fork() may lead to deadlocks",
    "support is in beta state",
    "ComplexHalf support is experimental",
    "nested tensors is in prototype stage",
    "Sparse invariant checks are implicitly disabled",
    "TypedStorage is deprecated",
    "The argument 'device' of Tensor.",
)


# From 2.10 on torch words its errors and warnings as ringloader does, and warnings name its caller.
HAS_NEW_WORDS = internals.warns_of_pickle_errors()
needs_new_words = pytest.mark.skipif(not HAS_NEW_WORDS, reason="older torch has other words")


@dataclass(frozen=True)
class Case:
    """The loader to iterate, and how far.

    `build` makes the loader's keyword arguments anew for every run. An argument that has an `observe()`
    method is asked after every step. `take` abandons every epoch but the last after so many batches.
    `ask_length` calls `len(loader)` first, after which torch counts what a stream yields.
    """

    build: Callable[[], dict[str, Any]]
    epochs: int = 1
    take: int | None = None
    max_steps: int = 300
    unordered: bool = False
    keep: bool = False
    ask_length: bool = False


@dataclass(frozen=True)
class Step:
    """One call of `DataLoader()`, `iter()` or `next()`: what came out and the state it left."""

    call: str
    outcome: Description
    warnings: tuple[tuple[str, str, str], ...]
    torch_state: str
    generator_state: str | None
    python_states: str
    observed: tuple[Any, ...]


@dataclass
class Record:
    steps: list[Step] = field(default_factory=list)
    # Batches themselves, only when the case asks for them.
    batches: list[Any] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Description]:
        return [step.outcome for step in self.steps]

    def delivered(self) -> list[Description]:
        return [step.outcome[1] for step in self.steps if step.outcome[0] == "batch"]


def _state(generator: torch.Generator | None) -> str:
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return digest(tensor_bytes(state))


def _python_states() -> str:
    numpy_state = np.random.get_state(legacy=True)
    text = repr((random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def describe_error(error: BaseException) -> Description:
    return (
        "error",
        f"{type(error).__module__}.{type(error).__qualname__}",
        normalise(str(error)),
        normalise(repr(error.args)),
    )


def forget_frames(error: BaseException) -> None:
    """Cuts the cycle that torch's `reraise` leaves: exception, traceback, frame, exception.

    In the cycle hangs the iterator. When the cycle is collected, the queues are closed before the iterator's
    `__del__` can send its last message, and torch waits five seconds for each worker.
    """
    error.__traceback__ = None


def seen_warnings(caught: list[warnings.WarningMessage]) -> tuple[tuple[str, str], ...]:
    """Category and text of every warning that can come twice."""
    found = []
    for warning in caught:
        text = normalise(str(warning.message))
        if not any(part in text for part in ONCE_PER_PROCESS):
            found.append((warning.category.__name__, text))
    return tuple(found)


@contextlib.contextmanager
def taking(path: str) -> Iterator[None]:
    """Loaders with workers take this path, and :func:`assert_path` expects it."""
    global expected_path
    previous = expected_path
    expected_path = "native" if path == AHEAD else path
    try:
        with pytest.MonkeyPatch.context() as patch:
            if path == AHEAD:
                from ringloader._core.with_workers import WorkersIterator

                patch.setattr(WorkersIterator, "_make_placement", lambda _: _AsItCame())
            yield
    finally:
        expected_path = previous


class _AsItCame:
    """Takes batches ahead of their turn, as pinning and devices do, and leaves them as they are."""

    depth = 2

    class _Prepared:
        def __init__(self, arrival: Any) -> None:
            self._arrival = arrival

        def result(self) -> Any:
            return self._arrival.unpack()

    prepare = _Prepared

    def stop(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def assert_path(iterator: Any, workers: int) -> str:
    """Returns the path the class under test took; fails if another path is under test."""
    import ringloader

    taken = ringloader.report(iterator)
    expected = expected_path if workers else "single-process"
    assert taken.path == expected, f"path {taken.path!r}, because {taken.reason}"
    return str(taken.path)


def run(loader_class: LoaderClass, case: Case) -> Record:
    """Iterates `case` with `loader_class` and writes down every step."""
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    record = Record()
    arguments = case.build()
    watched = [argument for argument in arguments.values() if hasattr(argument, "observe")]
    generator = arguments.get("generator")

    def step(call: str, function: Callable[[], Any]) -> tuple[str, Any]:
        value = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = function()
            except StopIteration as stop:
                kind, outcome = "stop", ("stop", normalise(repr(stop.args)))
                forget_frames(stop)
            except Exception as error:
                kind, outcome = "error", describe_error(error)
                forget_frames(error)
            else:
                kind = "batch"
                outcome = ("done",)
        if kind == "batch" and call == "next":
            outcome = ("batch", describe(value))
        record.steps.append(
            Step(
                call,
                outcome,
                seen_warnings(caught),
                _state(None),
                None if generator is None else _state(generator),
                _python_states(),
                tuple(item.observe() for item in watched),
            )
        )
        return kind, value

    built, loader = step("DataLoader", lambda: loader_class(**arguments))
    if built != "batch":
        return record
    if case.ask_length:
        step("len", lambda: len(loader))
    for epoch in range(case.epochs):
        made, iterator = step("iter", lambda: iter(loader))
        if made != "batch":
            continue
        if loader_class is not torch.utils.data.DataLoader:
            assert_path(iterator, loader.num_workers)
        last = epoch == case.epochs - 1
        _iterate(step, iterator, record, case, None if last else case.take)
        iterator = None
    loader = None
    gc.collect()
    return record


def _iterate(
    step: Callable[[str, Callable[[], Any]], tuple[str, Any]],
    iterator: Any,
    record: Record,
    case: Case,
    take: int | None,
) -> None:
    taken = 0
    stops = 0
    # One StopIteration may come out of a map-style dataset, and the iteration goes on; two are the end.
    while stops < 2 and taken != take and len(record.steps) < case.max_steps:
        kind, value = step("next", lambda: next(iterator))
        stops = stops + 1 if kind == "stop" else 0
        taken += kind == "batch"
        if case.keep and kind == "batch":
            record.batches.append(value)


def assert_same(expected: Record, actual: Record, *, unordered: bool = False) -> None:
    """Step by step: outcome, warnings, generators, what samplers saw."""
    if unordered:
        assert sorted(map(repr, actual.outcomes)) == sorted(map(repr, expected.outcomes))
        assert actual.steps[-1].torch_state == expected.steps[-1].torch_state
        assert actual.steps[-1].python_states == expected.steps[-1].python_states
        return
    for number, (theirs, ours) in enumerate(zip(expected.steps, actual.steps, strict=False)):
        place = f"step {number} ({theirs.call})"
        assert ours.call == theirs.call, place
        assert ours.outcome == theirs.outcome, place + difference(theirs.outcome, ours.outcome)
        assert ours.warnings == theirs.warnings, f"{place}: warnings"
        assert ours.torch_state == theirs.torch_state, f"{place}: state of the global generator"
        assert ours.generator_state == theirs.generator_state, f"{place}: state of the given generator"
        assert ours.observed == theirs.observed, f"{place}: what the samplers saw"
        assert ours.python_states == theirs.python_states, f"{place}: random or numpy.random was used"
    assert len(actual.steps) == len(expected.steps)


def compare(loader_class: LoaderClass, case: Case) -> tuple[Record, Record]:
    """Runs `case` with torch and, on every path, with `loader_class`: they cannot be told apart.

    Returns torch's record and that of the first path.
    """
    expected = run(torch.utils.data.DataLoader, case)
    assert expected.steps, "the case did nothing"
    actual = []
    for path in paths:
        with taking(path):
            actual.append(run(loader_class, case))
        try:
            assert_same(expected, actual[-1], unordered=case.unordered)
        except AssertionError as error:
            error.add_note(f"path: {path}")
            raise
    return expected, actual[0]
