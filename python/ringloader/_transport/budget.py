"""The shared memory that a loader may take for its batches."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringloader._common.proc import local_world_size
from ringloader._log import logger, mib
from ringloader._torch import internals

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

SMALLEST_SHARE = 1 << 20
# torch's `prefetch_factor` of a loader with workers that was given none.
_PREFETCH_FACTOR = 2


def share_per_worker(num_workers: int, max_shared_bytes: int | None, available: int) -> int:
    """Bytes for each worker.

    Args:
        num_workers: Workers that share equally.
        max_shared_bytes: What the user allows for the loader; None: a quarter of ``available`` for all
            processes of this job on the machine.
        available: Bytes that the machine and the control group have left.
    """
    if max_shared_bytes is None:
        return max(available // 4 // local_world_size() // num_workers, SMALLEST_SHARE)
    return max(max_shared_bytes // num_workers, 1)


def most_tasks(loader: TorchLoader, workers: int, in_turn: bool) -> int:
    """Returns how many batches of one worker can be on their way at once.

    Args:
        loader: The loader.
        workers: The most workers that it may have.
        in_turn: False if tasks go to the worker that has the fewest, and not by torch's rule.
    """
    factor = prefetch_factor_of(loader)
    # torch's constructor refuses anything else that stands there, and has drawn by then.
    per_worker = max(factor, 1) if isinstance(factor, int) else 1
    if in_turn and loader.in_order and loader._dataset_kind != internals.ITERABLE:
        # In turn, so an equal part each; after a reset in mid-epoch, those of the epoch before too.
        return 2 * per_worker + 1
    # One worker may be asked for all, where the others have ended or are slow.
    return per_worker * int(workers) + per_worker + 1


def prefetch_factor_of(loader: TorchLoader) -> Any:
    """Returns the ``prefetch_factor`` of a loader: torch's default for one that was to have no workers."""
    return _PREFETCH_FACTOR if loader.num_workers == 0 else loader.prefetch_factor


class RefusedError(Exception):
    """The system refuses shared memory, or another part of the transport. The text is for people."""


@contextlib.contextmanager
def asking(*errors: type[Exception]) -> Iterator[None]:
    """Raises a :class:`RefusedError` for errors of calls that ask the system, and run no code of the user's.

    Too many open files are an error as they are: torch's transport needs no fewer of them, and leaves workers
    behind where its start fails.

    Args:
        errors: What the calls raise where they are refused.
    """
    try:
        yield
    except errors as error:
        if is_for_descriptors(error):
            raise
        raise RefusedError(f"shared memory is not available: {error}{_limits_behind(error)}") from error


def is_for_descriptors(error: BaseException) -> bool:
    """True if too many files are open."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _limits_behind(error: BaseException) -> str:
    """Returns the limit that a refusal of memory may come from, to end its text; empty if none is known."""
    named = {errno.ENOMEM: ("AS", "v"), errno.EFBIG: ("FSIZE", "f")}.get(getattr(error, "errno", None) or 0)
    if named is None:
        return ""
    most, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{named[0]}"))
    return (
        "" if most == resource.RLIM_INFINITY else f"; RLIMIT_{named[0]} (ulimit -{named[1]}) is {mib(most)}"
    )


def log_oversize(nbytes: int, share: int, largest: int, num_workers: int) -> None:
    """Logs, for the first oversize batch of an iterator, the figures and what to turn.

    Args:
        nbytes: Bytes of the batch.
        share: Bytes of shared memory that each worker has.
        largest: Bytes of the largest batch that one of its slots takes.
        num_workers: Workers of the loader.
    """
    # Half a share holds it, with room for the table and for rounding.
    enough = num_workers * 2 * (nbytes + (1 << 20))
    if nbytes <= largest:
        why = f"had no room next to the batches that are held or on their way in its worker's {mib(share)}"
        what = f"pass max_shared_bytes={_in_mib(max(enough, 2 * num_workers * share))}"
    elif share // 2 < nbytes:
        why = f"is larger than half of its worker's {mib(share)}"
        what = f"pass max_shared_bytes={_in_mib(enough)}"
    else:
        why = f"is larger than the {mib(largest)} of address space for one batch with {num_workers} workers"
        what = "use fewer workers or a smaller prefetch_factor"
    logger.warning(
        "a batch of %s %s of shared memory, so it travels more slowly, in memory of its own; %s, "
        "or use a smaller batch_size",
        mib(nbytes),
        why,
        what,
    )


def _in_mib(nbytes: int) -> str:
    """Returns a size that is large enough, as a program would write it."""
    return f"{-(-nbytes >> 20)} * 2**20"


def log_refused(why: str) -> None:
    """Logs that the system did not take back all memory of an iterator that was closed.

    Args:
        why: What it refused.
    """
    logger.warning(
        "memory of a closed iterator could not be given back: %s; it goes with the iterator's last batch and "
        "the processes that were forked meanwhile. Unlock memory (mlockall), or raise vm.max_map_count",
        why,
    )
