"""A stream for copies to a device: what waits for it, and what must stay until it is done.

INVARIANT: the device is called in the thread that asks for a batch, and where an iterator ends, by no
thread of ours: while another thread captures a graph, that would break it.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ringloader._torch import internals

# What copies may read however many they are.
_MOST_BYTES = 32 << 20


class CopyStream:
    """Copies of one iterator to one device.

    Args:
        device: The device. Without an index, the one that is current now.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.stream = torch.Stream(device=self.device)
        self._fence = torch.Event(device=self.device)
        # In the order of the stream: what each event's copies read, and how much that is.
        self._under_way: collections.deque[tuple[torch.Event, Any, int]] = collections.deque()
        self._nbytes = 0

    def current(self) -> torch.Stream:
        """The stream of this device that is current in this thread."""
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def copying(self, after: torch.Stream, sources: list[Any]) -> Iterator[torch.Event]:
        """Copies are issued inside; the stream is current there.

        They begin behind what is queued on ``after``, which may still use memory that is written to.

        Args:
            after: The stream on which that memory was allocated.
            sources: What they read. It is kept until they are done, and may grow inside.

        Yields:
            What will have happened once they are done.
        """
        self._fence.record(after)
        self.stream.wait_event(self._fence)
        done = torch.Event(device=self.device)
        try:
            with internals.stream_context(self.stream):
                yield done
        finally:
            done.record(self.stream)
            nbytes = sum(getattr(source, "nbytes", 0) for source in sources)
            self._under_way.append((done, sources, nbytes))
            self._nbytes += nbytes

    def drop_sources(self, most: int) -> None:
        """Forgets what copies have read that are done.

        A caller may be far ahead of the device. Where what its copies still read is large, it waits for the
        device here, until no more than ``most`` batches are under way: pinned memory is the machine's.
        """
        under_way = self._under_way
        while under_way:
            done, _, nbytes = under_way[0]
            if not done.query():
                if len(under_way) <= most or self._nbytes <= _MOST_BYTES:
                    return
                done.synchronize()
            under_way.popleft()
            self._nbytes -= nbytes

    def close(self) -> None:
        """Waits for all copies. While the interpreter goes, what they read stays."""
        if sys.is_finalizing():
            return
        if self._under_way:
            self._under_way[-1][0].synchronize()
            self._under_way.clear()
            self._nbytes = 0
