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
        # In the order of the stream: what each event's copies read.
        self._under_way: collections.deque[tuple[torch.Event, Any]] = collections.deque()

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
            self._under_way.append((done, sources))

    def drop_sources(self) -> None:
        """Forgets what copies have read that are done."""
        under_way = self._under_way
        while under_way and under_way[0][0].query():
            under_way.popleft()

    def close(self) -> None:
        """Waits for all copies. While the interpreter goes, what they read stays."""
        if sys.is_finalizing():
            return
        if self._under_way:
            self._under_way[-1][0].synchronize()
            self._under_way.clear()
