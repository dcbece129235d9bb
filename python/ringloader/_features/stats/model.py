"""A model of an epoch by its parts: the time that it would take with other workers.

INVARIANT: the page "Is it the loader?" states this model.
"""

from __future__ import annotations

import dataclasses

# An epoch that is longer than the shortest by at most this part is as good, if it needs fewer workers.
AS_GOOD = 1.05
_MOST_WORKERS = 64
# The seconds of the main process to hand a task to a worker and to get its batch.
_HANDING = 20e-6


@dataclasses.dataclass(frozen=True)
class Model:
    """An epoch by its parts, in seconds for each batch.

    Attributes:
        batches: Batches behind the first.
        caller: The training step.
        main: Work of the main process in ``next``.
        work: Work of the workers.
        cpu: Processor time of that.
        start: The start of one worker; of the whole epoch.
        cores: Processors.
        handing: Work of the main process where there are workers.
    """

    batches: int
    caller: float
    main: float
    work: float
    cpu: float
    start: float
    cores: int
    handing: float = _HANDING

    def seconds(self, workers: int) -> float:
        """Returns the length of the epoch with a number of workers."""
        here = self.caller + self.main
        if workers == 0:
            step = here + self.work
        else:
            step = max(here + self.handing, self.work / workers, self.cpu / self.cores)
        return self.start * workers + self.work + self.batches * step

    def fewest_workers(self, most: int | None = None) -> int:
        """Returns the smallest number of workers with which the epoch is about as short as it may be.

        Args:
            most: The most workers that there may be.
        """
        numbers = range(1, (most or max(_MOST_WORKERS, self.cores)) + 1)
        shortest = min(map(self.seconds, numbers))
        return next(number for number in numbers if self.seconds(number) <= shortest * AS_GOOD)
