"""The main function of a worker process, up to torch's own loop.

The main process, the fork server and the server for ``spawn`` import this module too.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from typing import Any

import ringloader._native as _native
from ringloader._common import forks, moved_storages
from ringloader._worker import collate, malloc, queues
from ringloader._worker.endpoint import Berth, Seat, SentBerth

# A thread that waits or copies natively when the interpreter goes must not come back to it. Nor in a spawned
# worker, whose dataset may have threads.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    moved_storages.keep_views()


def run_worker(berth: Berth | SentBerth, target: Callable[..., None], args: Iterable[Any]) -> None:
    """Runs torch's worker loop at a worker's end of the transport. The main function of a worker process."""
    forks.tell_native()
    port = berth.board()
    heap = malloc.Trimming(malloc.keep_freed(berth.share))
    collate.allocate_in_slots(port)
    collate.replace_collate(port)
    worker = berth.worker
    ends = {
        Seat.TASKS: queues.Tasks(port, heap),
        Seat.RESULTS: queues.Results(port, f"in DataLoader worker process {worker}"),
        Seat.DONE: queues.Done(port),
    }
    target(*(ends[arg] if isinstance(arg, Seat) else collate.native(arg) for arg in args))
