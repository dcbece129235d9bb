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

    Takes the arguments of ``ringloader.DataLoader``, and returns the same batches. Samplers and datasets may
    have ``state_dict`` and ``load_state_dict``, too. The loader saves a sampler's state after each batch, and
    a dataset's state after every ``snapshot_every_n_steps`` batches. This takes time. It does not save the
    state of a dataset that is an ``nn.Module``, because that state is its weights.

    The page *Resume from a checkpoint* (guides/resuming.md) says what a state contains.

    Args:
        snapshot_every_n_steps: Number of batches after which a worker saves the state of a dataset that has
            ``state_dict``. Default: 1. More: guides/resuming.md.

    Raises:
        ValueError: As ``ringloader.DataLoader``.
        TypeError: As ``ringloader.DataLoader``.
        RuntimeError: On macOS and Windows.
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
        """Returns the position in the epoch, after the last batch that ``next`` has returned.

        Batches that workers have ready do not count. The call starts nothing, draws no random numbers and
        never waits. If the loader has two iterators, the state belongs to the newer one. After
        ``load_state_dict``, this method returns the loaded state until the next ``iter``.

        Returns:
            A dict of its own, which JSON and ``torch.load(weights_only=True)`` can load. It is ``{}`` in some
            cases where torch's own loader runs, for example with ``in_order=False``. The log then says so
            once.

        Raises:
            RuntimeError: If several threads share a dataset that has a state, or if ``last_batch="rollover"``
                keeps an index that is no int.
            Exception: Without workers, an error of the dataset's own ``state_dict``.
        """
        return tracked.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next ``iter`` resume from a state, with the first sample that was not returned.

        A running iterator does not change. ``num_workers``, ``batch_size`` and other options may differ from
        the loader that saved the state. The generators of the loader and its sampler return to where they
        were when the epoch began. ``{}`` does nothing.

        The loader compares the indices that it skips with the indices that the saved run returned. If they
        differ, ``iter`` or the first ``next`` raises ``ValueError``.

        Args:
            state_dict: The dict that ``state_dict`` has returned.

        Raises:
            TypeError: If it is no dict.
            ValueError: If its version is unknown, a key is missing or has a bad value, or the state is from a
                loader with another kind of sampler.
        """
        tracked.load(self, state_dict)

    def fingerprint(self) -> int | None:
        """Returns a sum over the samples that ``next`` has returned in this epoch: equal sums, equal samples.

        Each sample adds a hash of its index and of its place in the epoch. The sum is modulo ``2**64``. With
        a ``DistributedSampler``, places count over all ranks. So the sums of all ranks add up to the sum of a
        single process, also after each rank has loaded its own state. If the number of ranks changes, the
        sums begin again at 0: add the sums of the old ranks.

        The hash is ``z``, modulo ``2**64``. Places and indices begin at 0:

            z = (place + 1) * 0x9e3779b97f4a7c15 + index
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
            z = (z ^ (z >> 27)) * 0x94d049bb133111eb
            z = z ^ (z >> 31)

        If the batch sampler is not torch's, the place is ``batch * 2**32`` plus the place in the batch. Bad
        samples that ``on_error`` handles count, too.

        Returns:
            The sum; 0 before the first epoch. ``None`` for an iterable dataset, for indices that are no ints,
            after the state of another rank was loaded, and where ``state_dict`` returns ``{}``.
        """
        return tracked.fingerprint_of(self)


show_options(StatefulDataLoader, TABLE)
