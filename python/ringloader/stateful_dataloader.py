"""The loader whose position can be saved and loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import Dataset, Sampler

import ringloader._native as _native
from ringloader._features.pools.pool import WorkerPool
from ringloader._features.state import dataset_state, tracked
from ringloader._features.table import TABLE, show_options
from ringloader.bad_samples import OnError
from ringloader.dataloader import DataLoader, make
from ringloader.seeds import Seeds

_T_co = TypeVar("_T_co", covariant=True)


class StatefulDataLoader(DataLoader[_T_co]):
    """A ``ringloader.DataLoader`` with torchdata's ``state_dict`` and ``load_state_dict``.

    It gives the same batches as ``ringloader.DataLoader``, and takes all its arguments. In addition it asks
    samplers and datasets for their own states, which costs time: a sampler with ``state_dict`` and
    ``load_state_dict`` after each batch, and a dataset, or its iterator, after ``snapshot_every_n_steps``
    batches. A dataset that is an ``nn.Module`` is not asked: its state is weights. The page *Resume from a
    checkpoint* says what a state keeps.

    Args:
        snapshot_every_n_steps: Number of batches after which workers take the state of a dataset that has
            ``state_dict`` (default: 1). More: guides/resuming.md.

    Raises:
        ValueError: As ``ringloader.DataLoader``.
        TypeError: As ``ringloader.DataLoader``.
        RuntimeError: On other systems than Linux.
    """

    _ringloader_always = (tracked.feature_for,)
    _ringloader_asks_dataset = staticmethod(dataset_state.is_asked)

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        max_shared_bytes: int | None = None,
        device: torch.device | str | int | None = None,
        device_prefetch: int = 2,
        device_transform: Callable[[Any], Any] | None = None,
        worker_pool: WorkerPool | None = None,
        main_prefetch: int = 0,
        worker_method: Literal["multiprocessing", "thread"] = "multiprocessing",
        worker_task: Literal["batch", "sample"] = "batch",
        worker_concurrency: int = 1,
        last_batch: Literal["keep", "discard", "rollover"] | None = None,
        worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = None,
        seeding: Literal["torch", "epoch", "sample", "batch"] | None = None,
        seed: int | None = None,
        restart_workers: int = 0,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        sample_timeout: float | None = None,
        watchdog: float | None = None,
        stats: bool = False,
        snapshot_every_n_steps: int | None = 1,
        prefetch_epochs: bool = False,
    ) -> None:
        if not _native.SUPPORTED:
            raise RuntimeError(
                "ringloader.StatefulDataLoader needs Linux: on this system use torchdata's (pip install "
                "torchdata), whose states are others, or ringloader.DataLoader, which has none"
            )
        make(self, locals())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch: of the batches that ``next`` has returned, and no others.

        Batches that workers have ready do not count. The dict is a copy, and JSON and
        ``torch.load(weights_only=True)`` take it. Nothing is drawn, started or waited for. Of two iterators,
        it is the state of the one that was made last; after ``load_state_dict``, the loaded state until the
        next ``iter``.

        Returns:
            The state. It is ``{}`` in some cases where torch's own loader runs, for example with
            ``in_order=False``; the logger ``ringloader`` says so once.

        Raises:
            RuntimeError: If several threads share a dataset that has a state, or if an index that
                ``last_batch="rollover"`` keeps is no int.
            Exception: Without workers, an error of the dataset's own ``state_dict``.
        """
        return tracked.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next ``iter`` resume from a state: no sample is read again.

        A running iterator does not change. ``num_workers``, ``batch_size`` and other options may differ from
        those when the state was taken. The generators of the loader and its sampler are put back to where
        they were when the epoch began. ``{}`` does nothing. The indices skipped now must be those that the
        stopped run returned, else ``iter`` or the first ``next`` raises a ``ValueError``.

        Args:
            state_dict: The dict that ``state_dict`` has returned.

        Raises:
            TypeError: If it is no dict.
            ValueError: If its version is unknown, a key is missing or has a bad value, or it is the state of
                a loader with another kind of sampler.
        """
        tracked.load(self, state_dict)

    def fingerprint(self) -> int | None:
        """Returns a sum over the samples that ``next`` has returned in this epoch: equal sums, equal samples.

        It is the sum, modulo ``2**64``, of a hash of each sample's place in the epoch and its index. With a
        ``DistributedSampler`` the places are those of all ranks, so that the sums of the ranks add up to that
        of one process. This also holds after each rank has loaded its own state. After a change of the
        number of ranks, the sums begin again at 0: add the sums that the old ranks had reached.

        The hash ``z`` of an index at a place, both from 0 on, modulo ``2**64``:

            z = (place + 1) * 0x9e3779b97f4a7c15 + index
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
            z = (z ^ (z >> 27)) * 0x94d049bb133111eb
            z = z ^ (z >> 31)

        A batch sampler that is not torch's has places of its own: ``batch * 2**32`` plus the place in the
        batch.
        With ``on_error`` all samples of a batch count, the bad ones too.

        Returns:
            The sum; 0 before the first epoch. None for an iterable dataset, if an index was no int, after the
            state of another rank was loaded, and where ``state_dict`` returns ``{}``.
        """
        return tracked.fingerprint_of(self)


show_options(StatefulDataLoader, TABLE)
