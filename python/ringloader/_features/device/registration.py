"""Memory of batches that a driver has registered: page-locked, so that the device copies out of it."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import ringloader._native as _native
from ringloader._log import logger, mib
from ringloader._torch import devices


class Cudart:
    """The driver by CUDA's runtime, and by HIP's, which torch gives the same names."""

    # The memory counts as locked for all devices, not only for the current one.
    _PORTABLE = 1

    def register(self, address: int, nbytes: int, /) -> None:
        """Page-locks memory.

        Raises:
            RuntimeError: It cannot be had. Nothing is locked then.
        """
        self._check(lambda cudart: cudart.cudaHostRegister(address, nbytes, self._PORTABLE))

    def unregister(self, address: int, /) -> None:
        """Ends what was registered at an address, which no copy uses any more.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._check(lambda cudart: cudart.cudaHostUnregister(address))

    @staticmethod
    def _check(call: Callable[[Any], Any]) -> None:
        cuda: Any = torch.cuda
        cudart = cuda.cudart()
        # On the current device, the runtime would make a context if there is none.
        with devices.on_cuda_device_in_use():
            error = call(cudart)
            if int(error) == 0:
                return
            # The runtime keeps the error for the next launch that asks, which would be the user's.
            with contextlib.suppress(RuntimeError):
                torch.full((1,), 1.0, device="cuda")
        raise RuntimeError(f"{cudart.cudaGetErrorString(error)} ({int(error)})")


# The drivers by device type. Memory for any other type is not registered.
registrars: dict[str, Cudart] = {"cuda": Cudart()}


class Registrations:
    """The windows of one engine's memory that are registered, and how much of each.

    This object goes with the memory: from one epoch to the next, unless workers share windows. When it is
    dropped, all is unregistered: before the engine is closed or after, because closing leaves registered
    memory where it is.

    Args:
        memory: The engine's slots, and the windows that its workers share.
        device_type: Of the devices that copy out of them.
        registrar: Their driver.

    INVARIANT: the memory knows of a window before its driver does, and as long as it does.
    """

    # An attribute: an object that lives on while modules are torn down finds their names None.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, memory: _native.SlotMemory, device_type: str, registrar: Cudart) -> None:
        self.device_type = device_type
        self._memory = memory
        self._registrar = registrar
        self._windows: dict[int, _Window] = {}
        # True once nothing more of this memory is registered.
        self._is_over = False
        # Any thread may drop the last reference to a loader while another iterates.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(window.nbytes for window in list(self._windows.values()))

    def register(self, address: int, nbytes: int) -> bool:
        """Says whether a batch can be copied in place, after registering its window if that is worth while.

        The caller holds the batch's window, and no copy out of it is under way.

        Args:
            address: Where the window begins.
            nbytes: Bytes of the batch, from there.
        """
        window = self._windows.get(address)
        if window is not None and nbytes <= window.nbytes:
            return True
        return not self._is_over and self._extend(address, nbytes)

    def _extend(self, address: int, nbytes: int) -> bool:
        with self._lock:
            found = self._memory.window_of(address)
            if self._is_over or self._memory.is_inherited() or found is None or found[0] != address:
                return False
            window = self._windows.setdefault(address, _Window())
            _, touched = found
            if touched < nbytes or not window.is_due(touched):
                return False
            # Refused, the rest of the share is for batches of other sizes.
            return self._memory.set_registered(address, touched) and self._replace(address, window, touched)

    def _replace(self, address: int, window: _Window, nbytes: int) -> bool:
        try:
            if window.nbytes:
                # Two registrations side by side would not do: no copy may span both.
                self._registrar.unregister(address)
            # Noted before the call: an interrupt may come when the driver has it already.
            window.nbytes = nbytes
            try:
                self._registrar.register(address, nbytes)
            except RuntimeError:
                window.nbytes = 0
                self._memory.set_registered(address, 0)
                raise
        except RuntimeError as error:
            self._is_over = True
            _log_refused(self.device_type, nbytes, self.nbytes, error)
            return False
        window.times += 1
        window.missed = 0
        return True

    def close(self) -> None:
        """Unregisters all. No copy is under way.

        A forked child does nothing, because the driver is its parent's; nor is anything done while the
        interpreter goes, when the driver may have gone before.
        """
        if _has_exited or self._is_finalizing() or self._memory.is_inherited():
            # Before the lock, which a thread of the parent may have had at the fork.
            return
        with self._lock:
            self._is_over = True
            windows, self._windows = self._windows, {}
            refused = None
            for address, window in windows.items():
                if not window.nbytes:
                    continue
                try:
                    self._registrar.unregister(address)
                except RuntimeError as error:
                    # The memory stays mapped: the driver may still have it.
                    refused = error
                else:
                    self._memory.set_registered(address, 0)
            if refused is not None:
                logger.warning(
                    "shared memory could not be unregistered from the driver of %s devices: %s; it stays "
                    "until the process ends",
                    self.device_type,
                    str(refused).partition("\n")[0],
                )

    def __del__(self) -> None:
        self.close()


class _Window:
    """The registration of one window."""

    __slots__ = ("missed", "nbytes", "times")

    def __init__(self) -> None:
        # Bytes that the driver has, from the window's start.
        self.nbytes = 0
        # The number of times that it was registered.
        self.times = 0
        # Batches since then for which that was too little.
        self.missed = 0

    def is_due(self, touched: int) -> bool:
        """True if it should be registered now. A batch has come that is larger than what is registered.

        Registering costs about what a few copies do. So a window that is used once is not registered. One
        that has grown to twice the size is registered at once; and the more often it grew by little, the
        later.
        """
        if self.nbytes and touched >= 2 * self.nbytes:
            return True
        self.missed += 1
        return self.missed > max(1, self.times)


def registrations_of(transport: Any, device_type: str) -> Registrations | None:
    """Returns the registrations of a transport's memory for devices of a type, also of epochs before.

    None if they have no driver that registers. Those for another type are closed, whose copies have ended.
    Copies end before the transport closes.
    """
    found: Registrations | None = transport.beside
    if found is None or found.device_type != device_type:
        if found is not None:
            found.close()
        registrar = registrars.get(device_type)
        memory = transport.engine.slot_memory()
        found = None if registrar is None else Registrations(memory, device_type, registrar)
        transport.beside = found
    return found


def _log_refused(device_type: str, nbytes: int, before: int, error: RuntimeError) -> None:
    # Not on every system; only some have shared memory to register.
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = limit != resource.RLIM_INFINITY and before + nbytes > limit
    logger.warning(
        "%s of shared memory could not be registered with the driver of %s devices: %s%s; large "
        "tensors are copied through pinned memory instead",
        mib(nbytes),
        device_type,
        str(error).partition("\n")[0],
        f", and RLIMIT_MEMLOCK allows {mib(limit)}" if is_limited else "",
    )


_has_exited = False


@atexit.register
def _note_exit() -> None:
    global _has_exited
    _has_exited = True
