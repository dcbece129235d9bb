"""``device=`` and ``device_transform=``, as an iterator sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ringloader._core.feature import Feature, MemoryPlan, Setup, Stage, StagePosition, Take
from ringloader._features.device.device import Moving
from ringloader._features.devices import resolve
from ringloader._features.table import Options
from ringloader._worker import fetch

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader


def feature_for(_loader: TorchLoader, options: Options, setup: Setup) -> Feature | None:
    """Returns the feature that moves batches to a device, or transforms them on the CPU; None for neither."""
    device, transform = resolve(options.device), options.device_transform
    if device is None:
        return None if transform is None else Transforming(transform)
    transform = None if transform is None else fetch.through(transform)
    is_here = setup.path in ("single-process", "torch")
    return Device(Moving(device, options.device_prefetch, transform), is_here)


class Device(Feature):
    """Batches on a device.

    Args:
        moving: Moves them.
        is_here: True if they are moved in the call of ``next``.
    """

    position = StagePosition.PLACE

    def __init__(self, moving: Moving, is_here: bool) -> None:
        self._moving = moving
        self._is_here = is_here
        self.counters = moving.counts

    def memory(self, plan: MemoryPlan) -> MemoryPlan:
        # Memory that was registered for a device is not for batches that the user gets where they lie.
        return plan._replace(use=self._moving.device.type)

    def attach(self, transport: Any) -> None:
        # Threads have no memory to register.
        if hasattr(transport, "beside"):
            self._moving.transport = transport

    def close(self) -> None:
        transport = self._moving.transport
        if transport is not None and transport.joint_tasks is not None and transport.beside is not None:
            # Windows that workers share go with the iterator, and what is registered of them goes before.
            transport.beside.close()
            transport.beside = None

    def stages(self) -> Iterable[Stage]:
        return super().stages() if self._is_here else ()

    def around(self, take: Take) -> Take:
        return functools.partial(self._moved, take)

    def _moved(self, take: Take, iterator: OurIterator) -> Any:
        return self._moving.place_next(functools.partial(take, iterator))

    def placement(self) -> Moving:
        return self._moving

    def begin_epoch(self, loader: TorchLoader) -> None:  # noqa: ARG002
        if self._is_here:
            self._moving.abandon()
        self._moving.begin_epoch()


class Transforming(Feature):
    """``device_transform`` of batches that stay on the CPU.

    Args:
        function: The user's function.
    """

    position = StagePosition.PLACE

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def around(self, take: Take) -> Take:
        return functools.partial(self._next, take)

    def _next(self, take: Take, iterator: OurIterator) -> Any:
        batch = take(iterator)
        try:
            return self._function(batch)
        except StopIteration as error:
            # To the caller that would be the end of the epoch.
            raise RuntimeError("device_transform raised StopIteration") from error
