"""The main function of a worker process.

The main process, the fork server and the server for ``spawn`` import this module too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._torch import internals, stand_ins
from ringloader._worker import collate, loop
from ringloader._worker.channel import ProcessChannel, SentEndpoint, WorkerEndpoint
from ringloader._worker.options import WorkerOption

# A thread that waits or copies natively when the interpreter goes must not come back to it. Nor in a spawned
# worker, whose dataset may have threads.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    held_memory.keep_views()

# Numbers of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# By default glibc maps arrays of more than 32 MB anew each time and gives freed memory back at once, which
# costs a page fault for every 4 KB of every batch. A worker keeps memory of arrays up to this size instead.
_MOST = 256 << 20
# glibc raises its threshold by itself up to here.
_GLIBCS_OWN = 32 << 20
# A user that sets one of these has decided what the allocator does.
_TUNINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)

# Makes the channel of a worker.
ChannelMaker = Callable[[_native.Port, int], ProcessChannel]


def run_worker(worker_end: WorkerEndpoint | SentEndpoint, work: Iterable[Any]) -> None:
    """Runs the worker loop at a worker's end of the transport. The main function of a worker process.

    Args:
        worker_end: The end.
        work: The fields of a :class:`~ringloader._worker.loop.Work`. Its options come with the end.
    """
    port = attach(worker_end)
    # The main process raises it.
    with contextlib.suppress(KeyboardInterrupt):
        run_at(port, worker_end.share, worker_end.options, work)


def attach(worker_end: WorkerEndpoint | SentEndpoint) -> _native.Port:
    """Returns a worker's end of the transport, in the worker."""
    drop_what_it_began_with()
    held_memory.tell_of_forks()
    port = worker_end.attach()
    seconds = max((option.ends_within for option in worker_end.options), default=WorkerOption.ends_within)
    # A worker that is busy ends once it comes back to the loop.
    with contextlib.suppress(OSError):
        port.end_with_parent(_pipe_of_parent(), seconds)
    return port


def drop_what_it_began_with() -> None:
    """Drops in a process what the parent has given it for its start alone."""
    # The parent's, such as asyncio's: it would run the parent's handlers for the signals of this process.
    signal.set_wakeup_fd(-1)
    # Kept there, a dataset would not be finalised where the process ends.
    vars(multiprocessing.current_process())["_args"] = ()


def _pipe_of_parent() -> int | None:
    """Returns, in a process of a fork server, a pipe that only the main process holds open."""
    parent = multiprocessing.parent_process()
    return None if parent is None or parent.pid == os.getppid() else parent.sentinel


def run_at(
    port: _native.Port,
    share: int,
    options: Sequence[WorkerOption],
    fields: Iterable[Any],
    make_channel: ChannelMaker = ProcessChannel,
) -> Callable[[], object]:
    """Runs the worker loop at a port, and returns what gives back the memory that the allocator keeps.

    The process keeps the parts that are replaced here: see :class:`ringloader._torch.stand_ins.WorkerParts`.

    Args:
        port: The worker's end of the transport.
        share: Bytes of shared memory that are this worker's.
        options: The options of the iterator.
        fields: The fields of a :class:`~ringloader._worker.loop.Work`, without its options.
        make_channel: Makes the channel of the worker.
    """
    work = loop.Work(*fields)
    trim = _keep_freed(share)
    port.trim_by(trim)
    collate.allocate_in_slots(port)
    collate.replace_collate(port)
    stand_ins.port = port
    for option in options:
        replace = option.join(work.worker, port, work.start)
        make_channel = make_channel if replace is None else replace(make_channel)
    channel = make_channel(port, work.worker)
    work = work._replace(collate_fn=collate.native(work.collate_fn), options=options)
    _run_as_torchs(channel, work)
    return trim


def _run_as_torchs(channel: ProcessChannel, work: loop.Work) -> None:
    """Runs the loop in the surroundings of torch's worker. MIRRORS torch worker.py::_worker_loop."""
    try:
        internals.set_worker_signal_handlers()
        internals.set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        seed = work.base_seed + work.worker
        random.seed(seed)
        torch.manual_seed(seed)
        if internals.worker_module.HAS_NUMPY:
            import numpy

            numpy.random.seed(internals.generate_state(work.base_seed, work.worker))
        work = work._replace(dataset=internals.seeded(work.dataset, work.start.shared_seed))
        internals.worker_module._worker_info = internals.WorkerInfo(
            id=work.worker, num_workers=work.workers, seed=seed, dataset=work.dataset
        )
        loop.run(channel, work)
    finally:
        internals.worker_module._worker_info = None


def _keep_freed(share: int) -> Callable[[], object]:
    """Lets this process's allocator keep freed arrays of up to 256 MiB, or an eighth of ``share`` bytes.

    Does nothing with ``RINGLOADER_MALLOC=0``, where the user has tuned glibc, for a ``share`` so small that
    glibc's own rule keeps more, and where the C library has no ``mallopt``.

    Returns:
        What gives back the memory that was kept and is not used: glibc does not find the best place for an
        array at first, and what it tried before would stay. A function that does nothing if nothing is kept.
    """
    if os.environ.get("RINGLOADER_MALLOC") == "0" or any(name in os.environ for name in _TUNINGS):
        return bool
    # At worst glibc holds several arrays' worth of pieces until they are given back.
    kept = min(share // 8, _MOST)
    libc = ctypes.CDLL(None)
    if kept <= _GLIBCS_OWN or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return bool
    # Setting one ends glibc's adjustment of both, so only a pair makes sense.
    if not libc.mallopt(_M_MMAP_THRESHOLD, kept) or not libc.mallopt(_M_TRIM_THRESHOLD, kept):
        return bool
    return lambda: libc.malloc_trim(0)
