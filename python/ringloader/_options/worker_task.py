"""``worker_task="sample"``: how many batches are under way, and which are never cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringloader._options import kept, seeding
from ringloader._worker import gather

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The `prefetch_factor` of a loader with workers that was given none.
_TORCHS_DEFAULT = 2


def most_tasks(loader: TorchLoader) -> int:
    """Returns how many batches may be under way, over all workers."""
    factor = loader.prefetch_factor
    if factor == _TORCHS_DEFAULT and not kept.shows_options(loader):
        # torch's constructor has set it, where none was given.
        return default_prefetch(loader)
    # torch's constructor refuses anything else that stands there, and has drawn by then.
    return max(factor, 1) if isinstance(factor, int) else 1


def default_prefetch(loader: TorchLoader) -> int:
    """Returns the default of ``prefetch_factor``: 4, or as many as give each worker two samples."""
    samples = 1 if keeps_whole(loader) else loader.batch_size or 2 * loader.num_workers
    return max(4, -(-2 * loader.num_workers // samples))


def keeps_whole(loader: TorchLoader) -> bool:
    """True if a batch of a loader is made by one worker: its dataset gives several samples at a time."""
    return (
        not loader._auto_collation
        or gather.option_for(loader) is not None
        or seeding.gives_several(loader.dataset)
    )
