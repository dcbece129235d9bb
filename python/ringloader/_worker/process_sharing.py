"""``worker_task="sample"`` in worker processes: the channel over tasks that all of them share."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._log import logger
from ringloader._torch import collating
from ringloader._worker import malloc
from ringloader._worker.channel import ProcessChannel
from ringloader._worker.options import EpochStart
from ringloader._worker.sharing import NOTHING, Sharing, first_error


class ProcessSharing(Sharing):
    """Makes parts of batches in a worker process.

    Args:
        fds: The descriptors of the shared tasks' memory; how to get them, on their way to a worker.
        places: Batches that may be under way at once.
        window: Bytes of one, at most.
        keeps_whole: True if each batch is made by one worker.
        timed: True if runs are timed.
        epoch: Epochs that the iterator has begun, without the first.
    """

    def __init__(
        self,
        fds: tuple[Any, Any],
        places: int,
        window: int,
        keeps_whole: bool,
        timed: bool,
        epoch: int = 0,
    ) -> None:
        super().__init__(keeps_whole)
        self._fds = fds
        self._places = places
        self._window = window
        self._timed = timed
        self.epoch = epoch
        self.port: _native.SharingPort
        # Makes batches of rows; None where a batch is something else.
        self.rows: _native.SampleRows | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        sent = tuple(map(reduction.DupFd, self._fds))
        made = sent, self._places, self._window, self._keeps_whole, self._timed, self.epoch
        return ProcessSharing, made

    def meet(self, fetcher: Any) -> None:
        super().meet(fetcher)
        runs = self._runs
        collate = None if runs is None else collating.collate_within(runs.collate_fn, _native.Collate)
        self.rows = None if collate is None else _native.SampleRows(collate)

    def join(self, worker: int, port: _native.Port | None) -> None:  # noqa: ARG002
        assert port is not None
        fds = [fd if isinstance(fd, int) else fd.detach() for fd in self._fds]
        try:
            words, parts = fds
            self.port = _native.SharingPort(port, words, parts, self._places, self._window, self._timed)
        finally:
            for fd in fds:
                os.close(fd)

    def leave_process(self) -> None:
        """Drops the memory, and the channel that has it too."""
        del self.port, self.channel


class SharingChannel(ProcessChannel):
    """A :class:`~ringloader._worker.loop.Channel` over tasks that all workers share.

    Args:
        port: The process's end.
        worker: The worker's number.
        trimming: Gives back memory of the allocator while the worker is idle.
        sharing: The option, which has joined.
    """

    def __init__(
        self, port: _native.Port, worker: int, trimming: malloc.Trimming, sharing: ProcessSharing
    ) -> None:
        super().__init__(port, worker, trimming)
        self._take = self._take_shared
        self._sharing = sharing
        self._shared = sharing.port
        self._epoch = sharing.epoch
        # The last claim, until its samples are sent, or kept for its batch.
        self._claimed: _native.Claimed | None = None
        sharing.channel = self

    def _take_shared(self, timeout: float | None) -> tuple[Any] | None:
        found = self._shared.get(timeout, self._epoch)
        if isinstance(found, _native.Claimed):
            self._claimed = found
            return ((found.seq, found),)
        if found is not None and isinstance(found[0], EpochStart):
            self._epoch += 1
        return found

    def put(self, message: tuple[Any, Any]) -> None:
        number, data = message
        if data is NOTHING:
            return
        claimed = self._claimed
        if claimed is not None and isinstance(number, int):
            # The worker cannot make samples: the error is the run's.
            if not self.finish(claimed, data):
                return
            message = number, first_error(self.parts(claimed, data)) or data
        try:
            if self._shared.put_collated(message):
                return
        except Exception as error:
            self._put_failure(self._port.put, number, error)
            return
        super().put(message)

    def finish(self, claimed: _native.Claimed, samples: Any) -> bool:
        """Sends the samples of a run, or their error. Returns True if this worker collates the batch."""
        self._claimed = None
        if self._shared.begin_last(claimed):
            return True
        rows = self._sharing.rows
        try:
            if rows is not None and rows.write_rows(self._shared, claimed, samples):
                return self._shared.finish_rows(claimed)
            return self._shared.put(claimed, samples)
        except Exception as error:
            if self._shared.note_unsent():
                logger.warning(
                    "worker_task='sample': samples cannot be sent from one worker to another, so each batch "
                    "is made by one worker from now on: %s: %s",
                    type(error).__name__,
                    error,
                )
            return self._shared.put_nothing(claimed)

    def finish_without(self, claimed: _native.Claimed) -> bool:
        """Finishes a run without samples. Returns True if this worker answers for the batch."""
        self._claimed = None
        return self._shared.begin_last(claimed) or self._shared.put_nothing(claimed)

    def note_time(self, claimed: _native.Claimed, seconds: float) -> None:
        self._shared.note_time(claimed, seconds)

    def collated(self, claimed: _native.Claimed, own: Any) -> Any:
        rows = self._sharing.rows
        return None if rows is None else rows.over_rows(self._shared, claimed, own)

    def parts(self, claimed: _native.Claimed, own: Any) -> list[Any] | None:
        try:
            return self._shared.parts(claimed, own)
        except Exception:
            # Samples that cannot be unpickled here can be made here.
            logger.debug("worker_task='sample': a batch is made again by one worker", exc_info=True)
            return None
