"""The configurations that are measured. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ringloader._options.checks import THREAD

PROCESS = "multiprocessing"
# By the words of the command line.
METHODS = {"process": PROCESS, "thread": THREAD}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A loader, and its workers.

    Attributes:
        loader: The package whose iterator runs.
        num_workers: The number of workers.
        worker_method: Their kind, as the option of ``ringloader.DataLoader``; torch's are processes.
    """

    loader: Literal["torch", "ringloader"]
    num_workers: int
    worker_method: str = PROCESS

    @property
    def arguments(self) -> dict[str, int | str]:
        """The arguments of a loader with such workers."""
        found: dict[str, int | str] = {"num_workers": self.num_workers}
        return found if self.worker_method == PROCESS else {**found, "worker_method": self.worker_method}

    def __str__(self) -> str:
        return f"{self.loader} with {in_words(self.arguments)}"


def in_words(arguments: dict[str, int | str]) -> str:
    """Returns arguments as they stand in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def configurations(workers: Sequence[int], methods: Sequence[str]) -> list[Configuration]:
    """Returns the configurations of a bench. Those with as many workers stand side by side, torch's first."""
    found = []
    for number in workers:
        found.append(Configuration("torch", number))
        # Without workers there is no kind of them.
        found += [
            Configuration("ringloader", number, method) for method in (methods if number else [PROCESS])
        ]
    return found
