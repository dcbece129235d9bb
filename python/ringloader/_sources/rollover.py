"""A batch sampler whose samples that fill no whole batch open its next epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler


class RolloverBatchSampler(BatchSampler):
    """A ``BatchSampler`` whose leftover samples begin its next epoch, as Gluon's ``last_batch="rollover"``.

    With 10 samples in batches of 3, the first epoch has ``0-2``, ``3-5`` and ``6-8``. The second epoch begins
    with ``9, 0, 1``. All batches are whole.

    The leftover samples are the *remainder*. An epoch takes the remainder with its first batch. It leaves a
    new remainder when its sampler has ended. If you break out of an epoch, its remainder is lost, as with
    Gluon. Copies and pickles have the remainder.

    Args:
        sampler: Any iterable of indices.
        batch_size: Indices in a batch. A later value counts from the next epoch on.
        drop_last: False. Code that copies batch samplers passes it.

    Raises:
        ValueError: If ``batch_size`` is no positive int, or ``drop_last`` is true.
    """

    last_batch = "rollover"

    def __init__(
        self, sampler: Sampler[Any] | Iterable[Any], batch_size: int, drop_last: bool = False
    ) -> None:
        if drop_last:
            raise ValueError(
                f"drop_last={drop_last!r} and last_batch='rollover' do not go together: the remainder is "
                "either dropped or opens the next epoch"
            )
        super().__init__(sampler, batch_size, False)
        # Less than a batch, unless `batch_size` was set meanwhile.
        self._rest: list[Any] = []

    def __iter__(self) -> Iterator[list[Any]]:
        # MIRRORS core::plan::sampler::Stream::roll_over
        size = self.batch_size
        batch, self._rest = self._rest, []
        while len(batch) >= size:
            yield batch[:size]
            batch = batch[size:]
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []
        self._rest = batch

    def __len__(self) -> int:
        """Batches of the epoch that begins next. While one is under way, its remainder is not known yet."""
        return (len(self._rest) + len(self.sampler)) // self.batch_size  # type: ignore[arg-type]

    def rest(self) -> list[Any]:
        """The indices with which the next epoch begins."""
        return list(self._rest)

    def set_rest(self, rest: list[Any]) -> None:
        """Sets the indices with which the next epoch begins."""
        self._rest = list(rest)


# The method as it is here: a subclass, and code that replaces it, read in another way.
OWN_ITER = RolloverBatchSampler.__iter__
