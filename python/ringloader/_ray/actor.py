"""An actor of a Ray cluster, which is a worker of one iterator after another, on any machine."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import io
import os
import pickle
import platform
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._features.pools.main import Held, ProcessState, undo_options
from ringloader._features.pools.objects import Key
from ringloader._torch import internals
from ringloader._transport import budget
from ringloader._worker import entry, malloc
from ringloader._worker.channel import ProcessChannel
from ringloader._worker.options import WorkerOption

# Seconds in which an actor must reach the main process.
_REACHES_WITHIN = 30.0


class UnreachableError(Exception):
    """An actor cannot reach the main process."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The work of an actor for one iterator.

    Attributes:
        host: Where it connects to.
        port: The port there.
        token: The secret that begins each connection.
        worker: The number of the worker.
        number: The number under which it is expected.
        max_tasks: The most tasks that it may have.
        share: Bytes of memory that its batches may take.
        record: The number of the loader's record.
        objects: In a list, the reference to the loader's objects in Ray's store.
        work: The pickled fields of its ``Work``, and the options.
        keep: The numbers of all records that there are.
    """

    host: str
    port: int
    token: bytes
    worker: int
    number: int
    max_tasks: int
    share: int
    record: int
    objects: list[Any]
    work: bytes
    keep: set[int]


@dataclasses.dataclass(frozen=True)
class Birth:
    """An actor's first answer: its process, its node and its versions."""

    pid: int
    node: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Returns the versions that the main process and workers must have in common."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "Python": python,
        "torch": torch.__version__,
        "ringloader": importlib.metadata.version("ringloader"),
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[Key], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find

    def persistent_load(self, key: Any) -> Any:
        return self._find(key)


def _loads(data: bytes, find: Callable[[Key], Any]) -> Any:
    thing, named = _Unpickler(data, find).load()
    main = sys.modules["__main__"]
    for one in named:
        # A batch, or an error, names the class as the main process finds it.
        if "." not in one.__qualname__:
            setattr(main, one.__qualname__, one)
    return thing


class RelayEndpoint:
    """A worker's end, as ``entry.run_at`` takes it."""

    def __init__(self, share: int, options: Sequence[WorkerOption]) -> None:
        self.share = share
        self.options = options


class RelayChannel(ProcessChannel):
    """The channel of a worker whose rings a relay connects with the main process."""

    relay: _native.WorkerRelay

    def put(self, message: tuple[Any, Any]) -> None:
        if type(message[1]) is internals.IterableDatasetStopIteration:
            self.relay.end_part(message[0])
        super().put(message)


class Worker:
    """The actor."""

    def __init__(self) -> None:
        self._held = Held()
        self._numbers: set[int] = set()
        self._state = ProcessState()
        held_memory.tell_of_forks()

    def birth(self) -> Birth:
        """Says that it lives."""
        return Birth(os.getpid(), ray.util.get_node_ip_address(), versions())

    def run(self, assignment: Assignment) -> bool:
        """Runs the worker loop for one iterator.

        Returns:
            True if the actor may work for another one.

        Raises:
            UnreachableError: If the main process cannot be reached.
            BaseException: What unpickling raises, and an error of the dataset that ends a worker.
        """
        self._held.drop(self._numbers - assignment.keep)
        self._numbers &= assignment.keep
        if assignment.record not in self._numbers:
            (objects,) = assignment.objects
            things = _loads(ray.get(objects), self._held.get)
            self._held.put(assignment.record, things)
            self._numbers.add(assignment.record)
            del things
        work, options = _loads(assignment.work, self._held.get)
        relay = _connected(assignment)
        try:
            port = relay.attach()

            def channel(port: _native.Port, worker: int, trimming: malloc.Trimming) -> RelayChannel:
                made = RelayChannel(port, worker, trimming)
                made.relay = relay
                return made

            with warnings.catch_warnings():
                entry.run_at(port, RelayEndpoint(assignment.share, options), work, channel)
        finally:
            # Committed batches are still sent.
            relay.finish()
        del work
        undo_options(options)
        del options
        is_as_before = self._state.restore()
        self._held.restore()
        is_free, unmapped = port.leave(), weakref.ref(port)
        del port
        if is_free and unmapped() is not None:
            gc.collect()
        return is_as_before and is_free and unmapped() is None


def _connected(assignment: Assignment) -> _native.WorkerRelay:
    # Half of what is left here, whatever the main process allows.
    share = min(assignment.share, max(_native.available_memory() // 2, budget.SMALLEST_SHARE))
    try:
        return _native.WorkerRelay(
            assignment.host,
            assignment.port,
            assignment.token,
            assignment.worker,
            assignment.number,
            assignment.max_tasks,
            share,
            _REACHES_WITHIN,
        )
    except OSError as error:
        raise UnreachableError(
            f"an actor on {ray.util.get_node_ip_address()} cannot reach the main process at "
            f"{assignment.host}:{assignment.port} ({error}); pass host= to the Workers: an address of "
            "this machine that the cluster's nodes can reach"
        ) from None
