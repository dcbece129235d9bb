"""Stand-ins for a batch between the start of its move to a device and its turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ringloader._placement.device_copy import CopyStream
from ringloader._placement.failed_arrival import is_failed, once
from ringloader._placement.lookahead import Prepared


class Ready:
    """A batch that needs no device."""

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def result(self) -> Any:
        return self._data


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
        move_rest: Moves what of it is still to be moved, on the stream of the caller.
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
