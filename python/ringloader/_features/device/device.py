"""``device=``: batches on a device, copied there before their turn."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

import ringloader._native as _native
from ringloader._features.device.device_copy import (
    CopyStream,
    Later,
    Moved,
    no_inference_mode,
    stream_context,
)
from ringloader._features.device.device_tree import (
    Block,
    Packing,
    copy_each,
    has_to,
    leaves,
    memory_of,
    with_leaves,
)
from ringloader._features.device.registration import Registrations, registrations_of
from ringloader._torch import internals, modes
from ringloader._transport.lookahead import Prepared, Ready
from ringloader._transport.overdue import is_failed, once, reraise

# Devices without the streams and events that copies need: torch's own `.to()` moves their batches.
_WITHOUT_STREAMS = frozenset({"mps"})

_Transform = Callable[[Any], Any]


class Counts:
    """Counts of the batches, copies and bytes that were moved in an epoch.

    A report keeps it for as long as the loader is there, so it leads to nothing that may have the loader.
    """

    def __init__(self) -> None:
        self.begin_epoch()
        self.registrations: Registrations | None = None

    def begin_epoch(self) -> None:
        """Resets the counts."""
        self.batches = self.copies = self.staged = 0

    def __call__(self) -> dict[str, int]:
        return {
            "device_batches": self.batches,
            "device_copies": self.copies,
            "device_staged_bytes": self.staged,
            "device_registered_bytes": 0 if self.registrations is None else self.registrations.nbytes,
        }


class _Plan:
    """The memory that batches of one layout need on the device, and the copies to it."""

    __slots__ = ("_blocks", "_device", "_large", "_packed", "_sizes", "copies", "layout", "nbytes", "staged")

    def __init__(self, layout: _native.Layout, device: torch.device) -> None:
        self._device = device
        self.layout = layout
        self._packed = layout.packed
        self._large = layout.large
        self._blocks = [Block(nbytes, places, device) for nbytes, places in layout.blocks]
        self._sizes = [block.nbytes for block in self._blocks]
        self.copies = len(self._large) + sum(block.copies for block in self._blocks)
        self.staged = sum(self._sizes)
        self.nbytes = self.staged + sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in self._large)

    def allocate(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns new packed tensors, and large ones, in memory of the current stream."""
        return self._new(self._packed), self._new(self._large)

    def _new(self, tensors: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        device = self._device
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in tensors
        ]

    def copy(
        self,
        packed: list[torch.Tensor],
        staging: torch.Tensor | None,
        large: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:
        """Issues copies to the packed tensors and to the large ones, on the current stream."""
        if staging is not None and len(self._blocks) == 1:
            self._blocks[0].copy(staging, packed)
        elif staging is not None:
            for block, source in zip(self._blocks, staging.split_with_sizes(self._sizes), strict=True):
                block.copy(source, packed)
        copy_each(large, sources)


class Moving:
    """Moves batches to a device.

    Args:
        device: The device. Without an index, the one that is current when the first batch is moved.
        prefetch: How many batches are moved before their turn, at most.
        transform: The user's `device_transform`.

    Attributes:
        device: The device.
        transport: The transport whose memory arrivals lie in; None where none of it can be registered.
        depth: ``prefetch``.
        ahead: Batches that were not handed out.
        counts: Counts of what was moved in this epoch.
        is_short: True between an error before a batch's turn, perhaps out of memory, and that turn.
    """

    def __init__(
        self,
        device: torch.device,
        prefetch: int,
        transform: _Transform | None,
    ) -> None:
        self.device = device
        self._transform = transform
        self.counts = Counts()
        self.begin_epoch()
        self._copies: CopyStream | None = None
        self._plan: _Plan | None = None
        # Threads may share an iterator of torch's too.
        self._lock = threading.RLock()
        self.depth = prefetch
        self.ahead: set[Moved] = set()
        self.transport: Any = None
        self.is_short = False
        # Batches that torch's iterator has handed out and that could not be moved.
        self._kept: list[Any] = []

    @property
    def copies(self) -> CopyStream:
        """The stream of the copies, made with the first batch: workers have forked by then."""
        if self._copies is None:
            self._copies = CopyStream(self.device)
            if self.transport is not None:
                self.counts.registrations = registrations_of(self.transport, self.device.type)
        return self._copies

    def begin_epoch(self) -> None:
        """Called by ``iter()``, whose modes a transform has for each batch, whenever it runs."""
        self.counts.begin_epoch()
        self._modes = modes.CallerModes(self.device.type)

    def prepare(self, arrival: _native.Arrival) -> Prepared:
        """Begins to move a batch."""
        self.copies.drop_sources(self.depth + 2)
        if not self.is_short:
            try:
                return self._issue(arrival)
            except Exception:
                # Kept for its turn: until then there may be room.
                self.is_short = True
        return Later(lambda: self._issue_in_turn(arrival))

    def place_next(self, take: Callable[[], Any]) -> Any:
        """Moves a batch that torch's iterator hands out. One that could not be moved is the next again."""
        batch = self._kept.pop() if self._kept else take()
        try:
            data = self._placed(batch)
        except BaseException as error:
            self._kept.append(batch)
            if isinstance(error, Exception):
                self.explain(error)
            raise
        if is_failed(data):
            reraise(data)
        return data

    def _placed(self, batch: Any) -> Any:
        with self._lock, no_inference_mode():
            if self.device.type in _WITHOUT_STREAMS:
                return self._moved_here(batch) if self._transform is None else self._transformed(batch, True)
            self.copies.drop_sources(self.depth + 2)
            return self._issue_tree(batch).result()

    def stop(self) -> None:
        """Does nothing: no result waits for long."""

    def abandon(self) -> None:
        """Gives up the batches that were not handed out."""
        for moved in list(self.ahead):
            moved.abandon()
        self.ahead.clear()
        self._kept.clear()
        self.is_short = False

    def close(self) -> None:
        """Waits until nothing reads the batches that were moved."""
        if self._copies is not None:
            self._copies.close()

    def explain(self, error: BaseException) -> None:
        """Says what was done when an error was raised."""
        error.add_note(
            f"ringloader was moving a batch to {str(self.device)!r}, which may have "
            f"device_prefetch={self.depth} more batches"
        )

    def _issue(self, arrival: _native.Arrival) -> Prepared:
        if torch.is_inference_mode_enabled():
            with no_inference_mode():
                return self._issue(arrival)
        if (layout := arrival.layout()) is not None:
            return self._issue_plain(arrival, layout)
        return self._issue_tree(arrival.unpack())

    def _issue_in_turn(self, arrival: _native.Arrival) -> Prepared:
        try:
            # Without modes, as where it is issued ahead.
            with modes.without_modes():
                prepared = self._issue(arrival)
        except Exception as error:
            self.explain(error)
            raise
        self.is_short = False
        return prepared

    def _issue_plain(self, arrival: _native.Arrival, layout: _native.Layout) -> Prepared:
        """Issues a batch of tensors in lists, tuples and dicts, which the native side knows."""
        copies, plan = self.copies, self._plan
        if plan is None or plan.layout is not layout:
            plan = self._plan = _Plan(layout, copies.device)
        current = copies.current()
        if self._transform is None:
            packed, large = plan.allocate()
        else:
            with stream_context(copies.stream):
                packed, large = plan.allocate()
        staging = arrival.stage()
        if staging is not None:
            self.counts.staged += plan.staged
        large_sources = self._large_sources(arrival) if large else []
        sources = [staging, *large_sources]

        def make() -> Any:
            plan.copy(packed, staging, large, large_sources)
            self.counts.copies += plan.copies
            return layout.make(packed, large)

        return self._copied(make, current, sources, plan.nbytes, [*packed, *large])

    def _large_sources(self, arrival: _native.Arrival) -> list[torch.Tensor]:
        """Returns a batch's large tensors in page-locked memory: where they are, if the driver has that."""
        registrations = self.counts.registrations
        window = None if registrations is None else arrival.window()
        if window is not None and registrations is not None and registrations.register(*window):
            found = arrival.large()
            if found is not None:
                return found
        staged = arrival.stage_large()
        self.counts.staged += sum(source.nbytes for source in staged)
        return staged

    def _issue_tree(self, batch: Any) -> Prepared:
        """Issues any other batch."""
        if isinstance(batch, internals.ExceptionWrapper):
            return Ready(batch)
        copies = self.copies
        current = copies.current()
        found = once(leaves, batch)
        if is_failed(found):
            return Ready(found)
        packing = Packing(copies.device)
        is_partial = False
        here: list[torch.Tensor] = []
        others: list[Any] = []
        with contextlib.nullcontext() if self._transform is None else stream_context(copies.stream):
            for leaf in found:
                other = None
                if type(leaf) is torch.Tensor:
                    if leaf.device == copies.device:
                        here.append(leaf)
                        other = leaf
                    else:
                        other = packing.add(leaf)
                if other is None:
                    is_partial, other = True, leaf
                others.append(other)
            packing.stage()
        self.counts.staged += packing.staged

        def make() -> Any:
            packing.copy()
            self.counts.copies += packing.copies
            # Not before: where a copy fails, the batch is needed as it was.
            return once(with_leaves, batch, others)

        nbytes = sum(source.nbytes for source in packing.sources)
        # A transform reads the tensors that were on the device before, which belong to the caller's stream.
        sources = [*packing.sources, *here]
        return self._copied(make, current, sources, nbytes, packing.memory, is_partial)

    def _copied(
        self,
        make: Callable[[], Any],
        current: torch.Stream,
        sources: list[Any],
        nbytes: int,
        memory: list[torch.Tensor],
        is_partial: bool = False,
    ) -> Prepared:
        """Issues the copies of a batch to ``memory``, and then the user's transform."""
        copies, transform = self.copies, self._transform
        stream = current if transform is None else copies.stream
        issuing = copies.begin(current, sources, nbytes, memory)
        done = issuing.done
        try:
            try:
                with stream_context(copies.stream):
                    data = make()
                    if transform is not None and not is_failed(data):
                        if is_partial:
                            sources.append(data)
                        data, is_partial = self._transformed(data, is_partial), False
                        # The transform's input belongs to the stream of the copies. Only its result is used
                        # on another.
                        if not is_failed(data):
                            memory = once(memory_of, data, copies.device)
                            data = memory if is_failed(memory) else data
            finally:
                copies.end(issuing)
            self.counts.batches += 1
            if is_failed(data):
                stream.wait_event(done)
                return Ready(data)
            rest = self._moved_here if is_partial else None
            moved = Moved(self.ahead, copies, data, stream, done, memory, rest)
            issuing.memory = []
            return moved
        except BaseException:
            # The memory goes.
            stream.wait_event(done)
            raise

    def _transformed(self, data: Any, is_partial: bool) -> Any:
        """Returns what the transform makes of a batch, the rest of which may have to be moved before."""
        with self._modes.entered():
            data = self._moved_here(data) if is_partial else data
            return data if is_failed(data) or self._transform is None else once(self._transform, data)

    def _moved_here(self, data: Any) -> Any:
        """Returns a batch with the rest of it moved, or pinned, by its own methods, on the current stream.

        An error that every call would raise is the batch's, as a :class:`FailedArrival`: one of an object's
        own method, and one for a tensor that the device has no code for.
        """
        found = once(leaves, data)
        if is_failed(found):
            return found
        others = []
        for leaf in found:
            # What the move of such a leaf raises, it would raise in every call.
            lasting = NotImplementedError if type(leaf) is torch.Tensor else Exception
            other = once(self._moved_by_torch, leaf, lasting=lasting)
            if is_failed(other):
                return other
            others.append(other)
        return once(with_leaves, data, others)

    def _moved_by_torch(self, data: Any) -> Any:
        if not has_to(data):
            # torch pins for no device of that kind.
            return data if self.device.type in _WITHOUT_STREAMS else data.pin_memory()
        device = self.device if self.device.type in _WITHOUT_STREAMS else self.copies.device
        try:
            return data.to(device, non_blocking=True)
        except TypeError:
            # An object whose method takes no such argument.
            return data.to(device)
