"""``worker_task="sample"``: how many batches are under way, and which are never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ringloader._features import loader_options
from ringloader._features.arrays import gather
from ringloader._worker.fetch import gives_several

if TYPE_CHECKING:
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader

# The `prefetch_factor` of a loader with workers that was given none.
_TORCHS_DEFAULT = 2
# The most batches under way. Each worker looks through the places of all for samples to make.
_MOST = 1024
# The attribute of a loader with the default that was set as its `prefetch_factor`.
_DEFAULT = "_ringloader_default_prefetch"


def most_tasks(loader: TorchLoader) -> Callable[[int], int]:
    """Returns how many batches may be under way over all workers, as a function of their number."""
    factor = loader.prefetch_factor
    # torch's constructor has set its own, where none was given.
    is_torchs = factor in (_TORCHS_DEFAULT, None) and not loader_options.are_taken_by(loader)
    if is_torchs or (factor is not None and factor == vars(loader).get(_DEFAULT)):
        return _default_prefetch(loader)
    # torch's constructor refuses anything else that stands there, and has drawn by then.
    given = min(max(factor, 1), _MOST) if isinstance(factor, int) else 1
    return lambda _: given


def complete(loader: TorchLoader, options: Options, has_default_prefetch: bool) -> None:
    """Sets the default of ``prefetch_factor``: 4, or as many as give each worker two samples.

    It follows the number of workers where that changes.
    """
    if options.worker_task == "sample" and has_default_prefetch and loader.num_workers > 0:
        loader.prefetch_factor = vars(loader)[_DEFAULT] = _default_prefetch(loader)(loader.num_workers)


def _default_prefetch(loader: TorchLoader) -> Callable[[int], int]:
    # A batch sampler's batches may be of any size.
    samples = 1 if keeps_whole(loader) else loader.batch_size
    return lambda workers: 4 if samples is None else min(max(4, -(-2 * workers // samples)), _MOST)


def keeps_whole(loader: TorchLoader) -> bool:
    """True if a batch of a loader is made by one worker: its dataset gives several samples at a time."""
    return (
        not loader._auto_collation or gather.option_for(loader) is not None or gives_several(loader.dataset)
    )
