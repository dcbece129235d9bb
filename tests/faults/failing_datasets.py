"""Datasets that die, and the ones beside them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from small_datasets import Numbers


class Dies(Numbers):
    """At one index the worker ends in the named way."""

    def __init__(self, length: int, at: int, how: str) -> None:
        super().__init__(length)
        self.at = at
        self.how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and get_worker_info() is not None:
            if self.how == "exit":
                os._exit(3)
            if self.how == "exit 0":
                os._exit(0)
            if self.how == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Kills(Numbers):
    """At index 2 the worker ends by a signal, or with an exit code, once the batches before it were taken."""

    def __init__(self, how: object) -> None:
        super().__init__(4)
        self.how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            time.sleep(0.3)
            if isinstance(self.how, signal.Signals):
                os.kill(os.getpid(), self.how)
            if self.how == "KeyboardInterrupt":
                raise KeyboardInterrupt
            if self.how == "SystemExit":
                raise SystemExit(4)
            os._exit(int(str(self.how)))
        return super().__getitem__(index)


class Hangs(Numbers):
    """At one index, says so in a file and sleeps forever."""

    def __init__(self, length: int, at: int, told: str) -> None:
        super().__init__(length)
        self.at = at
        self.told = told

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            Path(self.told).write_text(str(os.getpid()))
            time.sleep(600)
        return super().__getitem__(index)


class Pauses(Numbers):
    """At one index it makes a file and waits for another one, for half a minute at most."""

    def __init__(self, length: int, at: int, folder: Path) -> None:
        super().__init__(length)
        self.at = at
        self.told = folder / "told"
        self.released = folder / "released"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.told.touch()
            until = time.monotonic() + 30
            while not self.released.exists() and time.monotonic() < until:
                time.sleep(0.001)
        return super().__getitem__(index)


class Sticks(Numbers):
    """Worker `w` makes `counts[w]` samples and then waits for a file that is called after it.

    The wait for one that a test did not release ends with the parent.
    """

    def __init__(self, length: int, counts: tuple[int, ...], folder: Path) -> None:
        super().__init__(length, 3)
        self.counts = counts
        self.folder = folder
        self.made = 0

    def stuck(self, worker: int) -> Path:
        """A file that is there once the worker waits."""
        return self.folder / f"stuck{worker}"

    def released(self, worker: int) -> Path:
        """The file that the worker waits for."""
        return self.folder / f"released{worker}"

    def pace(self) -> None:
        worker = get_worker_info().id
        if self.made == self.counts[worker]:
            self.stuck(worker).touch()
            while not self.released(worker).exists():
                time.sleep(0.001)
        self.made += 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.pace()
        return super().__getitem__(index)


class Waits(Dataset[Any]):
    """From an index on, or at some indices, it waits for a file. The wait ends with the parent."""

    def __init__(self, at: Any, released: Path, length: int = 40) -> None:
        self.at = at
        self.released = released
        self.length = length

    def __len__(self) -> int:
        return self.length

    def wait(self) -> None:
        parent, released = os.getppid(), os.fspath(self.released)
        # Calls of C alone: tests look for this frame at the top of the stack.
        while not os.access(released, os.F_OK) and os.getppid() == parent:
            time.sleep(0.001)

    def __getitem__(self, index: Any) -> Any:
        if index in self.at:
            self.wait()
        return index


class WaitsInOne(IterableDataset[Any]):
    """Each worker yields its number. Worker 1 then waits for a file."""

    def __init__(self, released: Path) -> None:
        self.waits = Waits((), released)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info().id
        yield worker
        if worker == 1:
            self.waits.wait()


class Raises(Numbers):
    def __init__(self, length: int, at: int) -> None:
        super().__init__(length)
        self.at = at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise KeyError(index)
        return super().__getitem__(index)


class Unpicklable(Numbers):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.function = (number for number in ())


class Opaque:
    """An index that cannot be pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle an opaque index")


def init_raises(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} refuses")
