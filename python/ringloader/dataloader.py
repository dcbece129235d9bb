"""The loader: torch's class with another iterator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

import ringloader._features.all as features
from ringloader._core import epochs, notes, pausing
from ringloader._core.feature import Hook
from ringloader._core.make import make_iterator
from ringloader._core.torchs import TorchsIterator
from ringloader._features import shutdown
from ringloader._features.all import construct
from ringloader._features.auto import FoundNumber
from ringloader._features.pools.pool import WorkerPool
from ringloader._features.report import at_exit, report
from ringloader._features.stats.epoch import EpochStats
from ringloader._features.stats.recording import epoch_stats
from ringloader._features.table import TABLE, options_of, show_options
from ringloader._torch import hook, internals
from ringloader.bad_samples import BadSample, OnError
from ringloader.seeds import Seeds

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

if TYPE_CHECKING:

    class _Iterator(pausing.Pausing, internals.DeclaredIterator):
        """The attributes of ``iter(loader)`` that callers may use."""


class _Errors:
    """``DataLoader.errors``, where a subclass or the caller has no attribute of that name."""

    def __get__(self, loader: object | None, owner: object) -> list[BadSample]:
        from ringloader._features.on_error import collecting

        return collecting.listed(loader)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """A ``torch.utils.data.DataLoader`` that sends batches through shared memory.

    Example:
        The import changes, and nothing else:

            from ringloader import DataLoader

            loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
            for images, labels in loader:
                train(images, labels)

    Takes torch's arguments, and returns the same batches in the same order, with the same random numbers.
    You may write to a batch, and keep it after the epoch. In some cases torch's own loader runs:
    ``ringloader.report(loader)`` names the reason.

    ``More:`` names a page of the documentation. ``pip show --verbose ringloader`` prints its address.

    Args: torch's own
        dataset: torch's: a map-style dataset, or an ``IterableDataset``.
        batch_size: torch's: samples in a batch; ``None`` returns single samples (default: 1).
        shuffle: torch's: ``True`` for another order in each epoch (default: ``None``, no).
        sampler: torch's: indices of the samples, in place of ``shuffle``.
        batch_sampler: torch's: lists of indices, one for each batch.
        num_workers: Number of workers. With ``"auto"``, the loader finds the number, and changes it while it
            runs. Default: 0 (the main process makes the batches). More: tuning.md.
        collate_fn: torch's: function that makes a batch of a list of samples.
        pin_memory: torch's: ``True`` for tensors in pinned memory (default: ``False``).
        drop_last: torch's: ``True`` to leave out an incomplete last batch (default: ``False``).
        timeout: torch's: seconds to wait for a batch before ``next`` raises (default: 0, no limit).
        worker_init_fn: torch's: function that each worker calls with its number when it starts.
        multiprocessing_context: torch's: start method of the workers, or a context.
        generator: torch's: random numbers for the order and for the seeds of workers.
        prefetch_factor: torch's: batches that each worker makes ahead (default: ``None``, 2).
        persistent_workers: torch's: ``True`` to keep workers between epochs (default: ``False``).
        pin_memory_device: torch's: device to pin for; recent versions ignore it (default: ``""``).
        in_order: torch's: ``False`` to return each batch as soon as it is made (default: ``True``).

    Args: speed
        worker_pool: Pool of worker processes that several loaders share. Default: ``None`` (each iterator
            starts its own workers). More: pools.md.
        main_prefetch: Number of finished batches that a thread of the main process unpickles ahead. Default:
            0 (``next`` unpickles batches). More: iterators.md.
        worker_method: Kind of workers. ``"multiprocessing"``: processes. ``"thread"``: threads of this
            process. Default: ``"multiprocessing"``. More: threads.md.
        worker_task: ``"batch"``: each worker makes whole batches. ``"sample"``: all workers make samples of
            the same batch. Default: ``"batch"``, as with torch. More: tuning.md.
        worker_concurrency: Maximum number of samples that a worker loads at the same time. For datasets that
            wait for a store or a network. Default: ``1`` (one sample after another, as with torch). More:
            slow_stores.md.
        prefetch_epochs: ``True`` begins the next epoch before the current one ends. ``iter`` then finds its
            first batches ready. Default: ``False`` (``iter`` begins the epoch). More: prefetch_epochs.md.

    Args: order and randomness
        last_batch: Samples left over at the end of an epoch. ``"keep"``: they are a smaller batch.
            ``"discard"``: they are dropped. ``"rollover"``: the next epoch begins with them. Default:
            ``None`` (torch's ``drop_last`` decides). More: epochs.md.
        worker_reset_fn: Function that each worker calls when an epoch begins:
            ``worker_reset_fn(dataset, worker_info, seeds)``. Default: ``None``. More: epochs.md.
        seeding: Time at which a worker seeds ``random``, ``numpy.random`` and torch. ``"torch"``: once, when
            the worker starts. ``"epoch"``, ``"batch"``, ``"sample"``: before each epoch, batch or sample.
            Default: ``None`` (``"torch"``, or ``"sample"`` with ``worker_task="sample"`` or
            ``num_workers="auto"``). More: seeds.md.
        seed: Number from which ``seeding`` and ``ringloader.Seeds`` derive their numbers. Pass the same
            number on all ranks. Default: ``None`` (torch's base seed, which each rank draws itself). More:
            seeds.md.

    Args: errors
        restart_workers: Maximum number of crashed workers to replace in an epoch. Default: 0 (a crashed
            worker raises torch's error). More: restarts.md.
        on_error: Reaction to a sample that raises. ``"raise"``: raise its error. ``"skip"``: leave it out.
            ``"retry"`` or a ``ringloader.Retry``: try again. A function: its result replaces the sample.
            Default: ``"raise"``, as with torch. More: bad_samples.md.
        max_errors: Maximum number of samples that ``on_error`` may skip or replace in an epoch. After that, a
            bad sample raises. Default: ``None`` (any number). More: bad_samples.md.
        sample_timeout: Maximum seconds for one sample, or for one call of ``collate_fn``. A sample that takes
            longer raises ``TimeoutError``. Default: ``None`` (no limit). More: watchdog.md.

    Args: memory
        max_shared_bytes: Maximum bytes of shared memory for the batches that all workers make ahead. Default:
            ``None`` (a quarter of the free memory of the machine or control group, divided by
            ``LOCAL_WORLD_SIZE``). More: tuning.md.

    Args: devices
        device: Device to which the loader copies each batch, on a separate stream. Values: a ``torch.device``
            of the current accelerator, its name, an index, ``"auto"``, or ``None``. Default: ``None``
            (batches stay on the CPU). More: accelerators.md.
        device_prefetch: Number of batches that the loader copies to the device ahead. Default: 2. More:
            accelerators.md.
        device_transform: Function that gets each batch on the device. ``next`` returns its result. Default:
            ``None``. More: accelerators.md.

    Args: watching
        watchdog: Seconds that ``next`` waits before the log names each late worker, its batch and its Python
            stack. Default: ``None`` (never). More: watchdog.md.
        stats: ``True`` measures where the time of each epoch goes. ``epoch_stats()`` returns the figures.
            Default: ``False``. More: guides/is_it_the_loader.md.

    Raises:
        ValueError: If torch refuses an argument, a value is out of range, ``device`` does not exist, or two
            options cannot be combined. More: options.md.
        TypeError: If a value has the wrong type.
    """

    # Make the features that are on in each iterator of a subclass.
    _ringloader_always: ClassVar[tuple[Any, ...]] = ()

    #: The bad samples of the newest epoch, in the order of the batches that ``next`` has returned.
    errors = _Errors()

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
        prefetch_epochs: bool = False,
    ) -> None:
        make(self, locals())

    def __repr__(self) -> str:
        if "max_shared_bytes" not in vars(self):
            # The constructor may have raised, so any attribute may be missing.
            return super().__repr__()
        note = notes.of(self)
        path = "not iterated yet" if note is None else f"path {note.path}"
        is_auto = isinstance(self.num_workers, FoundNumber)
        workers = f"auto ({self.num_workers})" if is_auto else self.num_workers
        return (
            f"<{type(self).__name__} of {report.sized(self.dataset)}: batch_size={self.batch_size}, "
            f"num_workers={workers}, {path}>"
        )

    if TYPE_CHECKING:

        def __iter__(self) -> _Iterator: ...

    else:

        def __getattr__(self, name: str) -> Any:
            if name in ("state_dict", "load_state_dict", "fingerprint"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}: ringloader.DataLoader has no "
                    "state; use ringloader.StatefulDataLoader",
                    name=name,
                    obj=self,
                )
            # Raises as without this method, also the error of a property that was not found.
            return object.__getattribute__(self, name)

    def _get_iterator(self) -> Any:
        beneath = hook.beneath(internals.Loader._get_iterator)
        here = Hook(beneath, super()._get_iterator, features, self._ringloader_always)
        iterator = make_iterator(self, options_of(self), here)
        if not isinstance(iterator, pausing.Pausing):
            torchs, iterator = iterator, TorchsIterator(iterator)
            notes.pass_on(self, torchs, iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, in samplers and datasets that have ``set_epoch``.

        In this process, the number reaches these objects at once:

        - the loader's ``sampler`` and ``batch_sampler``, and the batch sampler's ``sampler``;
        - the dataset, and datasets inside torch's ``Subset``, ``ConcatDataset``, ``ChainDataset`` or
          ``StackDataset``.

        Workers that start later get the dataset with its number. Persistent workers, and workers of a
        ``worker_pool``, call ``set_epoch`` of their dataset when the next epoch begins. If this call raises,
        each batch of that epoch raises the error. If several loaders share a dataset, each worker gets the
        number of its own loader. ``ringloader.Seeds`` use the number, and add one for each later epoch
        without a call.

        Args:
            epoch: The epoch, from 0 on.

        Raises:
            TypeError: If it is no int.
            ValueError: If it is negative.
        """
        epochs.set_next(self, epoch)

    def epoch_stats(self) -> EpochStats:
        """Returns the figures of the newest epoch: where its time went, and what to change.

        Needs ``stats=True``. For a loader of another class, call ``ringloader.epoch_stats(loader)``.

        Returns:
            The figures at the last call of ``next``. Later batches do not change them.

        Raises:
            RuntimeError: If the loader's last epoch had no ``stats=True``, or if there was no epoch yet.
        """
        return epoch_stats(self)

    def call_workers(self, fn: Callable[..., _T], *args: Any, timeout: float | None = None) -> list[_T]:
        """Calls ``fn(dataset, *args)`` in each living worker, and returns the results in order of workers.

        The call waits for all workers. Each worker first makes the batches that it was already asked for.
        Then its main thread calls ``fn``. So ``next`` may return some more batches from before the call.

        Inside ``fn``, ``get_worker_info().dataset`` is the same dataset. The function, arguments and results
        are pickled, and tensors copied, unless workers are threads. Without workers, this process calls
        ``fn`` with its own dataset.

        Args:
            fn: The function. It is pickled by its name: its module must have had it when the worker started.
            *args: Further arguments of ``fn``.
            timeout: Seconds to wait (default: the loader's ``timeout``; if that is 0, no limit).

        Raises:
            Exception: An error of ``fn``, as torch raises a worker's error. If several workers raise, the
                error of the first worker.
            RuntimeError: If no worker is alive, if a worker ends during the call or does not answer in time,
                or if batches travel by torch's own transport. A worker that is too late may still call the
                function.
            pickle.PicklingError: If the function, or an argument, cannot be sent to worker processes.
        """
        from ringloader._features import calls

        return calls.call_workers(self, shutdown.alive(self), fn, args, timeout)

    def shutdown(self) -> None:
        """Ends this loader's iterators and workers now, and gives back the memory that it keeps.

        Persistent workers end, too. If you still hold an iterator, its ``next`` raises ``RuntimeError`` from
        then on, also in another thread that waits in it. Batches that were returned stay valid. All busy
        workers together have 5 seconds to end; then they are terminated.

        You may iterate the loader again, with new workers, and shut it down again. Any thread may call this
        method. In a forked child, it does not touch the parent's workers and memory.

        ``with DataLoader(...) as loader:`` calls ``shutdown`` at the end of the block, also after an
        exception.
        """
        shutdown.shut_down(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


at_exit.expect_loaders()
show_options(DataLoader, [name for name, about in TABLE.items() if not about.is_of_states])
# torch's arguments after the dataset, with their defaults.
_TORCHS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in ("self", "dataset") and (name not in TABLE or TABLE[name].is_torchs)
}


def make(loader: DataLoader[Any], arguments: dict[str, Any]) -> None:
    """Makes a loader of the arguments of its constructor, by their names."""
    construct(loader, super(DataLoader, loader).__init__, _TORCHS, arguments)
