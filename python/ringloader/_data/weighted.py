"""torch's sampler by weights, for any number of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import sampler as torch_sampler

# More, torch.multinomial refuses.
MULTINOMIAL = 1 << 24
# Indices that become Python numbers at once.
_CHUNK = 1 << 16


class WeightedRandomSampler(torch_sampler.WeightedRandomSampler):
    """``torch.utils.data.WeightedRandomSampler`` for more than 2**24 weights too.

    With up to 2**24 weights, it returns the same indices as torch's class. With more, torch raises an error.
    This class then draws from the same distribution, to the precision of ``float64``:

    - With replacement, it calls ``torch.rand(num_samples, dtype=torch.float64)`` once, and looks up each
      number in the cumulative sum of the weights.
    - Without replacement, it draws one exponential number for each weight (``exponential_`` of a ``float64``
      tensor). Then it takes the ``num_samples`` largest quotients of weight and number, as torch does.

    The random numbers come from ``generator``, or torch's default one. They are drawn when the first index is
    asked for.

    Args:
        weights: As torch's.
        num_samples: As torch's.
        replacement: As torch's.
        generator: As torch's; on the CPU.

    Raises:
        ValueError: If torch refuses an argument.
        RuntimeError: In ``iter``, if weights are negative, infinite or NaN, or if their sum is not positive
            and finite. Without replacement, also if fewer than ``num_samples`` weights are positive.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            weights: Sequence[float],
            num_samples: int,
            replacement: bool = True,
            generator: torch.Generator | None = None,
        ) -> None: ...

    def __iter__(self) -> Iterator[int]:
        if len(self.weights) <= MULTINOMIAL:
            yield from super().__iter__()
            return
        drawn = self._drawn()
        for start in range(0, len(drawn), _CHUNK):
            yield from drawn[start : start + _CHUNK].tolist()

    def _drawn(self) -> torch.Tensor:
        weights = self.weights
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        positive = int(torch.count_nonzero(weights))
        if positive == 0:
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
        if self.replacement:
            return self._with_replacement()
        if positive < self.num_samples:
            raise RuntimeError(
                f"cannot sample num_samples={self.num_samples} without replacement: "
                f"only {positive} weights are positive"
            )
        numbers = torch.empty_like(weights).exponential_(generator=self.generator)
        torch.div(weights, numbers, out=numbers)
        return numbers.topk(self.num_samples).indices

    def _with_replacement(self) -> torch.Tensor:
        ends = self.weights.cumsum(0)
        total = float(ends[-1])
        if total == float("inf"):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities is infinite)")
        numbers = torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator)
        # The first end that is larger: never that of a weight of zero. A product may round up to the total.
        last = torch.searchsorted(ends, ends[-1:])
        return torch.searchsorted(ends, numbers.mul_(total), right=True).clamp_(max=int(last))


WeightedRandomSampler.__module__ = "ringloader"
