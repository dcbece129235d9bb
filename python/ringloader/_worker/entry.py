"""The main function of a worker process, up to torch's own loop.

The main process, the fork server and the server for ``spawn`` import this module too.
"""

from __future__ import annotations

import atexit
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
    forks.tell_native()
    port = worker_end.attach()
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
