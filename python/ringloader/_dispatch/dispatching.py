"""The dispatching process of an iterator over a `Dispatch`: its start and its end."""

from __future__ import annotations

import os
import socket
from multiprocessing import reduction
from typing import Any

from ringloader._dispatch import dataset, process, stream
from ringloader._start import spawn, stuck
from ringloader._torch import versions

# Bytes that items may take in the dispatching process, where a share is less.
_LEAST_HELD = 64 << 20


class _SentSocket:
    """A socket as the argument of a process."""

    def __init__(self, one: socket.socket) -> None:
        self._socket = one

    def detach(self) -> int:
        """Returns the socket's descriptor, in a process that was forked."""
        return self._socket.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (reduction.DupFd(self._socket.fileno()),)


def _as_it_is(sent: Any) -> Any:
    return sent


class Dispatching:
    """The dispatching process of one iterator, and what its workers are given to reach it.

    Args:
        source: The loader's dataset.
        context: The ``multiprocessing`` context that starts the workers.
        workers: How many there will be.
        share: Bytes of shared memory for the items of one worker.
        in_turn: Whether a worker waits for the others' batches, in order or because tasks go round.

    Raises:
        Exception: What starting a process raises. Nothing is left then.
    """

    def __init__(
        self, source: dataset.Dispatch, context: Any, workers: int, share: int, in_turn: bool
    ) -> None:
        # The dataset as workers need it.
        self.without_source = dataset.without_source(source)
        most_held = max(share, _LEAST_HELD) if in_turn and dataset.may_drop(source) else None
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            arguments = (source._source, _SentSocket(theirs), workers, share, os.getpid(), most_held)
            made = context.Process(target=process.run_dispatcher, args=arguments)
            made.daemon = True
            self._process = spawn.by_server(made)
            self._process.start()
            stuck.note_started(self._process)
            del made, arguments
        except BaseException:
            self._requests.close()
            raise
        finally:
            # Messages of workers must fail once the process has ended, so only the process has its end.
            theirs.close()
        pid = self._process.pid
        self.option = stream.DispatchEnd(
            source._key, self._requests, pid, source._prefetch, share, most_held is not None
        )

    def close(self) -> None:
        """Ends the process. Its workers have ended."""
        self._requests.close()
        self._process.terminate()
        stuck.end(self._process, process.GRACE_SECONDS)


def dispatching_for(loader: Any, context: Any, share: int) -> Dispatching | None:
    """Starts dispatching for an iterator of a loader with workers. None if its dataset needs none."""
    if not isinstance(loader.dataset, dataset.Dispatch):
        return None
    in_turn = loader.in_order or not versions.counts_tasks_per_worker()
    return Dispatching(loader.dataset, context, loader.num_workers, share, in_turn)
