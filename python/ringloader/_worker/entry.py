"""The main function of a worker process, up to torch's own loop.

The main process, the fork server and the server for ``spawn`` import this module too.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any

import ringloader._native as _native
from ringloader._common import forks, moved_storages, worker_port
from ringloader._worker import collate, fetch, malloc, queues
from ringloader._worker.endpoint import QueueEnd, SentEndpoint, WorkerEndpoint

# A thread that waits or copies natively when the interpreter goes must not come back to it. Nor in a spawned
# worker, whose dataset may have threads.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    moved_storages.keep_views()


def run_worker(
    worker_end: WorkerEndpoint | SentEndpoint, target: Callable[..., None], args: Iterable[Any]
) -> None:
    """Runs torch's worker loop at a worker's end of the transport. The main function of a worker process."""
    run_at(attach(worker_end), worker_end, target, args)


def attach(worker_end: WorkerEndpoint | SentEndpoint) -> _native.Port:
    """A worker's end of the transport, in the worker."""
    forks.tell_native()
    port = worker_end.attach()
    # Else it ends once it comes back to torch's loop.
    with contextlib.suppress(OSError):
        port.end_with_parent(_pipe_of_parent())
    return port


def _pipe_of_parent() -> int | None:
    """In a process of a fork server, a pipe that only the main process holds open."""
    parent = multiprocessing.parent_process()
    return None if parent is None or parent.pid == os.getppid() else parent.sentinel


def run_at(
    port: _native.Port,
    worker_end: WorkerEndpoint | SentEndpoint,
    target: Callable[..., None],
    args: Iterable[Any],
) -> malloc.Trimming:
    """Runs torch's worker loop at a port, and returns what gives back the memory that the allocator keeps.

    What is put in place for it stays there: see :func:`ringloader._torch.internals.WorkerParts`.
    """
    trimming = malloc.Trimming(malloc.keep_freed(worker_end.share))
    collate.allocate_in_slots(port)
    collate.replace_collate(port)
    worker_port.port = port
    worker = worker_end.worker
    tasks: Any = queues.Tasks(port, trimming)
    if worker_end.steps or fetch.in_place():
        fetch.put_steps(worker_end.steps)
        tasks = fetch.joining(worker_end.steps, worker, port, tasks)
    ends = {
        QueueEnd.TASKS: tasks,
        QueueEnd.RESULTS: queues.Results(port, f"in DataLoader worker process {worker}"),
        QueueEnd.DONE: queues.Done(port),
    }
    target(*(ends[arg] if isinstance(arg, QueueEnd) else collate.native(arg) for arg in args))
    return trimming
