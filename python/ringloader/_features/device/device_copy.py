"""Copies to a device: their stream, what must stay until they are done, and a batch until its turn.

INVARIANT: the device is called in the thread that asks for a batch, and where an iterator ends, by no
thread of ours: while another thread captures a graph, that would break it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from ringloader._transport.lookahead import Prepared
from ringloader._transport.overdue import is_failed, once

# Bytes that copies under way may read, however many copies they are.
_MOST_BYTES = 32 << 20
# By process and device. torch has few streams for a device, and memory of one serves no other.
_streams: dict[tuple[object, torch.device], torch.Stream] = {}
# By process, device and the stream's number: the streams that use, or used, memory of the copy stream.
_readers: dict[tuple[object, torch.device], dict[int, torch.Stream]] = {}


def stream_on(device: torch.device) -> torch.Stream:
    """The stream of all copies of this process to a device, which has an index."""
    key = (os.getpid(), device)
    if key not in _streams:
        _streams[key] = torch.Stream(device=device)
    return _streams[key]


class Copies:
    """Copies of one batch.

    INVARIANT: they are under way, and so all that they read and write is kept, before the first is issued: an
    interrupt may come at any step.

    Args:
        done: Happens once they are done, if they were all issued.
        sources: Objects that they read.
        nbytes: Their bytes.
        memory: Tensors that they write to, until another object sees to it that they do not go too early.
    """

    __slots__ = ("done", "is_issued", "memory", "nbytes", "sources")

    def __init__(
        self, done: torch.Event, sources: list[Any], nbytes: int, memory: list[torch.Tensor]
    ) -> None:
        self.done = done
        self.sources = sources
        self.nbytes = nbytes
        self.memory = memory
        self.is_issued = False


class CopyStream:
    """Copies of one iterator to one device.

    Args:
        device: The device. Without an index, the one that is current now.
    """

    # An attribute: while modules are torn down, their names are None.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._index = index
        self.stream = stream_on(self.device)
        self._readers = _readers.setdefault((os.getpid(), self.device), {})
        self._fence = torch.Event(device=self.device)
        # In the order of the stream.
        self._under_way: collections.deque[Copies] = collections.deque()

    def current(self) -> torch.Stream:
        """The stream of this device that is current in this thread."""
        return torch.accelerator.current_stream(self._index)

    def begin(
        self, after: torch.Stream, sources: list[Any], nbytes: int, memory: list[torch.Tensor]
    ) -> Copies:
        """Makes copies that are issued from now on wait for the work that is queued on a stream.

        That may still use memory which is written to. So may streams on which there are batches in memory of
        the copy stream, made by a transform: not all of a batch need be found by ``memory_of``.

        Args:
            after: The stream on which that memory was allocated.
            sources: Objects that are read. They are kept until the copies are done.
            nbytes: Their bytes.
            memory: Tensors that are written to.

        Returns:
            The copies, for :meth:`end`.
        """
        self._wait_for(after)
        # Other threads add to them.
        for reader in tuple(self._readers.values()):
            if reader != after:
                self._wait_for(reader)
        copies = Copies(torch.Event(device=self.device), sources, nbytes, memory)
        self._under_way.append(copies)
        return copies

    def _wait_for(self, stream: torch.Stream) -> None:
        self._fence.record(stream)
        self.stream.wait_event(self._fence)

    def add_reader(self, stream: torch.Stream) -> None:
        """Memory of the copy stream is in use on another one, where no allocator need know of it."""
        if stream.stream_id not in self._readers:
            self._readers[stream.stream_id] = stream

    def end(self, copies: Copies) -> None:
        """Ends the issue of these copies. Called for each :meth:`begin`, whatever is raised."""
        copies.done.record(self.stream)
        copies.is_issued = True

    def drop_sources(self, most: int) -> None:
        """Forgets what copies have read that are done.

        A caller may be far ahead of the device. Where what its copies still read is large, it waits for the
        device here, until no more than ``most`` batches are under way: pinned memory is the machine's.
        """
        under_way = self._under_way
        while under_way:
            first = under_way[0]
            if not first.is_issued:
                # An interrupt has come meanwhile.
                self.end(first)
            if not first.done.query():
                if len(under_way) <= most or sum(one.nbytes for one in under_way) <= _MOST_BYTES:
                    return
                first.done.synchronize()
            under_way.popleft()

    def close(self) -> None:
        """Waits for all copies that were issued. While the interpreter goes, what they read stays."""
        if self._is_finalizing() or not self._under_way:
            return
        # Not for the event of the last ones: another call, in any thread, may have issued copies since.
        issued = torch.Event(device=self.device)
        issued.record(self.stream)
        issued.synchronize()
        while self._under_way and self._under_way[0].is_issued:
            self._under_way.popleft()


class Moved:
    """A batch on the device, whose copies may still be under way.

    INVARIANT: until they are, its memory is not given back, or given back behind them on ``stream``.

    Args:
        ahead: Batches that were not handed out. This one is among them until it is.
        copies: The stream of the copies.
        data: The batch.
        stream: On which its memory was allocated.
        done: What happens once its copies are done.
        memory: Tensors that have its memory, where those in ``data`` need not all be known.
        move_rest: Moves the leaves that were not packed, on the caller's stream.
    """

    __slots__ = ("_ahead", "_copies", "_data", "_done", "_memory", "_move_rest", "_stream")

    def __init__(
        self,
        ahead: set[Moved],
        copies: CopyStream,
        data: Any,
        stream: torch.Stream,
        done: torch.Event,
        memory: list[torch.Tensor],
        move_rest: Callable[[Any], Any] | None = None,
    ) -> None:
        self._ahead = ahead
        self._copies = copies
        self._data = data
        self._stream = stream
        self._done = done
        self._memory = memory
        self._move_rest = move_rest
        ahead.add(self)

    def result(self) -> Any:
        """The batch. The caller's stream waits for it, and its memory for the caller's stream."""
        current = self._copies.current()
        current.wait_event(self._done)
        if self._stream == self._copies.stream:
            self._copies.add_reader(current)
        if current != self._stream:
            for tensor in self._memory:
                # An object's own method may raise, and would in every call.
                recorded = once(tensor.record_stream, current)
                if is_failed(recorded):
                    self.abandon()
                    self._ahead.discard(self)
                    return recorded
        data = self._data
        if self._move_rest is not None:
            with no_inference_mode():
                data = self._move_rest(data)
        self._ahead.discard(self)
        return data

    def abandon(self) -> None:
        """Gives the batch up: its memory may be given back from now on."""
        self._stream.wait_event(self._done)


class Later:
    """A batch whose copies could not be begun before its turn. They are begun in its turn."""

    def __init__(self, issue: Callable[[], Prepared]) -> None:
        self._issue = issue
        self._issued: Prepared | None = None

    def result(self) -> Any:
        if self._issued is None:
            self._issued = self._issue()
        return self._issued.result()


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """Leaves the caller's inference mode: a batch may be moved in it whose turn comes outside of it."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # Without ``no_grad`` gradients would be on.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def stream_context(stream: torch.Stream) -> Generator[None]:
    """Makes a stream, and its device, the current ones of this thread.

    ``with stream`` would keep the streams that were current before on the stream object, where threads and
    nested entries overwrite each other's. torch 2.6 does not have it.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    try:
        # Inside the `try`: an interrupt after this call must not leave it set.
        torch.accelerator.set_stream(stream)
        yield
    finally:
        # Each call sets the device too.
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)
