"""An actor of a Ray cluster, which is a worker of one iterator after another on any machine, and its pickles.

The dataset and the functions of a loader are pickled once, and put into Ray's store once.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import io
import os
import pickle
import platform
import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import ray
import ray.cloudpickle
import torch

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._features.pools.main import Held, ProcessState, Unpickler, undo_options
from ringloader._features.pools.objects import Key, Record
from ringloader._start import fallback
from ringloader._torch import internals
from ringloader._transport import budget
from ringloader._worker import entry
from ringloader._worker.channel import ProcessChannel

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


def _loads(data: bytes, held: Held) -> Any:
    thing, named = Unpickler(io.BytesIO(data), held).load()
    main = sys.modules["__main__"]
    for one in named:
        # A batch, or an error, names the class as the main process finds it.
        if "." not in one.__qualname__:
            setattr(main, one.__qualname__, one)
    return thing


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by value what no module has, and notes the classes of the main module among it.

    Args:
        file: Where the pickle goes.
        keys: By their addresses, objects that the actor has, with their keys.
    """

    # The table of Ray's class hides the attribute that a pickler reads.
    dispatch_table = vars(pickle.Pickler)["dispatch_table"]

    def __init__(self, file: io.BytesIO, keys: Mapping[int, Key]) -> None:
        super().__init__(file, pickle.DEFAULT_PROTOCOL)
        self.dispatch_table = fallback.reducers_of(ray.cloudpickle.CloudPickler)
        self._keys = keys
        self.named: list[type] = []

    def persistent_id(self, thing: Any) -> Key | None:
        return self._keys.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type) and thing.__module__ == "__main__" and thing not in self.named:
            self.named.append(thing)
        return super().reducer_override(thing)


def dumps(thing: object, keys: Mapping[int, Key]) -> bytes:
    """Pickles an object for an actor, with the classes of the main module that it needs.

    Args:
        thing: The object.
        keys: By their addresses, objects that the actor has, with their keys.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, keys)
    # The list is pickled last, and has by then what the object needs.
    pickler.dump((thing, pickler.named))
    return file.getvalue()


class RayRecord(Record):
    """The objects of one loader in Ray's store, in the state of its first iterator.

    Raises:
        TypeError: If one of them cannot be pickled.
    """

    def __init__(self, number: int, things: Mapping[str, Any]) -> None:
        super().__init__(number, things)
        self.ref: Any = ray.put(_pickled(things))


def _pickled(things: Mapping[str, Any]) -> bytes:
    try:
        return dumps(dict(things), {})
    except Exception as error:
        for name, thing in things.items():
            try:
                dumps(thing, {})
            except Exception as why:
                raise TypeError(
                    f"{name} cannot be pickled for workers on other machines ({type(why).__name__}: {why}); "
                    "let each worker make what cannot be pickled, at the first use"
                ) from error
        raise TypeError(
            f"the loader's objects cannot be pickled for workers on other machines: {error}"
        ) from error


class RelayChannel(ProcessChannel):
    """The channel of a worker whose rings a relay connects with the main process."""

    def __init__(self, relay: _native.WorkerRelay, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._relay = relay

    def put(self, message: tuple[Any, Any]) -> None:
        if type(message[1]) is internals.IterableDatasetStopIteration:
            self._relay.end_part(message[0])
        self._port.put(message)


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
            things = _loads(ray.get(objects), self._held)
            self._held.put(assignment.record, things)
            self._numbers.add(assignment.record)
            del things
        work, options = _loads(assignment.work, self._held)
        relay = _connected(assignment)
        try:
            port = relay.attach()
            channel = functools.partial(RelayChannel, relay)
            with warnings.catch_warnings():
                entry.run_at(port, assignment.share, options, work, channel)
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
