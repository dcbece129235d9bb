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
from ringloader._core import epochs, pausing
from ringloader._core.feature import Hook
from ringloader._core.make import make_iterator
from ringloader._core.torchs import TorchsIterator
from ringloader._features import loader_options
from ringloader._features.auto import FoundNumber
from ringloader._features.constructing import construct
from ringloader._features.pools.pool import WorkerPool
from ringloader._features.report import at_exit, report
from ringloader._features.shutdown import shutdown
from ringloader._features.stats.epoch import EpochStats
from ringloader._features.stats.recording import epoch_stats
from ringloader._features.table import TABLE
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
    """``torch.utils.data.DataLoader`` whose batches travel over shared-memory rings.

    Takes all arguments of torch's ``DataLoader``, which checks them, and gives the same batches in the same
    order with the same random numbers. Without workers, and wherever the rings cannot replace torch's own
    transport, it behaves as torch's loader. ``ringloader.report`` names the path of an iterator.

    Tensors of a batch lie in shared memory. They are yours to read and to write for as long as they live:
    also after the epoch, and after the loader is gone. If you keep many large batches, later ones are copied
    to private memory, so that workers never wait for you.

    ``pip show --verbose ringloader`` names the address of the documentation.

    Args:
        dataset: The dataset: with indices, or an ``IterableDataset``. It and all arguments until ``in_order``
            are torch's.
        batch_size: Samples per batch; ``None``: each sample comes alone (default: 1).
        shuffle: ``True`` to have another order in each epoch (default: ``None``, no).
        sampler: Indices of the samples, in their order, in place of ``shuffle``.
        batch_sampler: Lists of indices, one for each batch, in place of ``batch_size``, ``shuffle``,
            ``sampler`` and ``drop_last``.
        num_workers: How many workers make batches. With ``"auto"`` the loader finds the number, and changes
            it while it runs (``"auto"``, or a number as with torch; default: 0, the caller makes them).
            Batches are the same for any number, so ``seeding`` is ``"sample"`` by default. The loader begins
            with one worker, and adds more as long as the caller waits for batches and processors and memory
            are left; one that brings too little is ended. ``loader.num_workers`` is then the number that
            runs, and before the first ``iter`` the bound: the processors of this process, divided by
            ``LOCAL_WORLD_SIZE``, less one for the caller where there are more than two. Workers that mostly
            wait may be four times as many, up to 64, and no more than a ``worker_pool`` has. An
            ``IterableDataset``, a dataset that has a ``state_dict``, and torch's own loader have the bound.
        collate_fn: Function that makes a batch of a list of samples (default: torch's ``default_collate``).
        pin_memory: ``True`` to have tensors in pinned memory, for copies to an accelerator (default:
            ``False``).
        drop_last: ``True`` to leave out the last batch if it has fewer samples (default: ``False``).
        timeout: Seconds to wait for a batch of a worker, then it is an error (default: 0, no limit).
        worker_init_fn: Function that each worker calls with its number when it starts.
        multiprocessing_context: The start method of worker processes: ``"fork"``, ``"spawn"``,
            ``"forkserver"`` or a context (default: ``None``, the system's).
        generator: Random numbers for the order, and for the seeds of workers (default: ``None``, torch's
            global generator).
        prefetch_factor: How many batches each worker has ready or under way (default: ``None``, 2).
        persistent_workers: ``True`` to keep the workers from one epoch to the next (default: ``False``).
        pin_memory_device: The device to pin for. Recent versions of torch do not need it (default: ``""``).
        in_order: ``False`` to have each batch as soon as it is made (default: ``True``).
        max_shared_bytes: Bytes of shared memory that batches on their way may take, over all workers (a
            positive int, or ``None``; default: ``None``, a quarter of what the machine and the control group
            have left, divided by ``LOCAL_WORLD_SIZE``). Each worker has an equal share. A batch larger than
            half a share travels more slowly, in memory of its own, which also counts until the main process
            has taken the batch. A worker with a batch larger than its share has no other batch on its way.
            Batches that you hold count up to half of each share; copies in private memory do not count.
        device: Device on which batches arrive, copied on a stream of their own (a ``torch.device`` of the
            current accelerator, its name, an index, ``"auto"``, or ``None``; default: ``None``, batches stay
            on the CPU). ``"auto"`` is the current accelerator, or the CPU if there is none, or if a fork has
            made it unusable. The stream that is current when a batch is returned waits for its copies.
            ``pin_memory`` then adds nothing. A loader in a worker process leaves its batches on the CPU, and
            calls no ``device_transform``.
        device_prefetch: How many batches to copy before their turn, in addition to the one that is returned
            and the one that the caller still has (an int, 0 or more; default: 2). With 0, the copies of a
            batch begin when it is asked for. Without workers, and where torch's own loader runs, no batch is
            copied early.
        device_transform: Function that gets each batch on the device, on the stream of the copies, and
            returns the batch for the caller (a callable, or ``None``; default: ``None``). It may run before
            the batch's turn, and has the gradient mode, autocast and default device that ``iter()`` was
            called in. It runs once for each batch, and again if memory was short or the program was
            interrupted. With ``device="auto"`` and no accelerator it runs on the CPU, in the batch's turn and
            the modes of ``next()``.
        worker_pool: Pool whose processes are the workers, which several loaders share (a
            ``ringloader.WorkerPool``, or ``None``; default: ``None``, each iterator starts its own workers).
            ``num_workers=0`` then means as many as the pool has. The loader keeps the pool, and the pool does
            not keep the loader.
        main_prefetch: How many of the batches that workers have ready a thread of the main process decodes
            before their turn (an int, 0 or more; default: 0, ``next`` decodes them). For batches that are
            slow to unpickle. No effect where torch's own loader runs.
        worker_method: Kind of workers: processes, or threads of this process (``"multiprocessing"``,
            ``"thread"``; default: ``"multiprocessing"``). All threads use the same dataset object, and a
            batch is the worker's own object, not a copy. In a thread, ``get_worker_info().rng`` has
            generators with torch's seeds for the worker; the global ones are the process's and are not
            seeded. No effect without workers.
        worker_task: Unit of work of a worker: a batch, or samples of the earliest batches, which all workers
            make (``"batch"``, ``"sample"``; default: ``"batch"``, a worker makes whole batches, as torch's).
            With ``"sample"`` the first batch comes sooner, fewer batches are under way, and a slow sample
            holds up its own batch alone. ``prefetch_factor`` then counts batches over all workers (default:
            4, or as many as give each worker two samples). ``collate_fn`` runs in the worker that makes the
            batch's last samples. A dataset with ``__getitems__`` and one of plain arrays give whole batches:
            any idle worker takes the next. A worker makes as many samples at a time as take about a
            millisecond.
        last_batch: Use of samples that fill no whole batch at the end of an epoch: kept, discarded, or
            carried over to the next epoch (``"keep"``, ``"discard"``, ``"rollover"``, or ``None``; default:
            ``None``, as torch's ``drop_last`` says). ``"keep"`` and ``"discard"`` are torch's
            ``drop_last=False`` and ``True``; with ``"rollover"`` the samples open the next epoch, and ``len``
            counts the epoch that begins next. See ``ringloader.RolloverBatchSampler``.
        worker_reset_fn: Function that each worker calls when an epoch begins, before its first batch, as
            ``worker_reset_fn(dataset, worker_info, seeds)``, with torch's ``WorkerInfo`` and
            ``ringloader.Seeds`` (a callable, or ``None``; default: ``None``). It returns the dataset of that
            epoch, or None for the same one. Its error is the error of the epoch's batches. Without workers
            the main process calls it, as a single worker 0.
        seeding: When the generators of ``random``, ``numpy.random`` and torch's CPU are seeded (``"torch"``,
            ``"epoch"``, ``"sample"``, ``"batch"``, or ``None``; default: ``None``, ``"sample"`` with
            ``worker_task="sample"`` or ``num_workers="auto"``, else ``"torch"``: when a worker starts). With
            ``"epoch"`` each worker sets them when an epoch begins, from ``ringloader.Seeds``; without workers
            it has no effect. With ``"sample"`` they are set before each sample, from ``seed``, the epoch and
            the sample's place in it; with ``"batch"`` before each batch, from the place of its first sample.
            So random augmentation is the same for any number of worker processes, restarted ones too, and for
            ``"sample"`` for any ``batch_size``. With a ``DistributedSampler`` a place is that among the
            samples of all ranks; else each rank has keys of its own. ``collate_fn`` has a key of its batch. A
            dataset with ``__getitems__`` draws for its batch from the key of the first sample. Each worker of
            an ``IterableDataset`` counts its own samples. In a thread, only those of
            ``get_worker_info().rng`` are set, not the global ones. Without workers the program's generators
            are put back before ``next`` returns. Each task goes to the worker with the fewest unanswered
            ones, unless the dataset is iterable or has a ``state_dict``; batches come in their order.
        seed: Number that ``ringloader.Seeds`` and ``seeding`` come from, the same in all ranks (an int, 0 or
            more, or ``None``; default: ``None``, torch's base seed, which each process draws). The order of
            the samples does not depend on it.
        restart_workers: How many crashed workers to restart per epoch (an int, 0 or more; default: 0, the
            error is torch's). The successor does the tasks that the worker had not delivered, so no batch is
            lost, and none comes twice. It has the worker's number and seed, and the dataset as it then is in
            the main process, and calls ``worker_init_fn``; its generators begin anew, so random augmentation
            may differ. A sample that crashes its worker again is an error for ``on_error``. Workers of an
            ``IterableDataset`` are not restarted.
        on_error: Handling of samples that raise: raise their error, skip them, try again, or call a function
            (``"raise"``, ``"skip"``, ``"retry"``, a ``ringloader.Retry``, or a callable; default:
            ``"raise"``, as torch does). ``"skip"`` leaves the sample out of its batch, and leaves out a batch
            without samples. The worker calls a function as ``on_error(index, error)``; it returns another
            sample, or raises.
        max_errors: How many samples per epoch ``on_error`` may skip or replace; one more raises its error (an
            int, 0 or more, or ``None``; default: ``None``, any number). A batch that ``collate_fn`` cannot
            make counts as one.
        sample_timeout: Seconds that one sample, or a batch's ``collate_fn``, may take in a worker; then it is
            an error (a number of seconds, more than 0, or ``None``; default: ``None``, no limit). The worker
            process is ended, and another one makes the rest of its batch again, without counting for
            ``restart_workers``. The error is a ``TimeoutError`` of the sample, for which ``on_error``
            decides. No effect without workers.
        watchdog: Seconds without a batch after which the logger ``ringloader`` names each late worker, its
            batch, for how long it has been in it, and its Python stack (a number of seconds, more than 0, or
            ``None``; default: ``None``, never). It does so again each time the wait has doubled. No effect
            without workers.
        stats: ``True`` to note where the time of each epoch goes, for ``epoch_stats()`` (default: ``False``).
        prefetch_epochs: ``True`` to begin the next epoch of persistent workers when the last indices of this
            one have been sent, so that ``iter`` finds its first batches ready (default: ``False``, ``iter``
            begins it). Its sampler then draws earlier than torch's, also after the last epoch of the program.
            With a ``worker_pool`` the loader keeps its processes, as with ``persistent_workers``.

    Raises:
        ValueError: If torch refuses an argument; if a value is out of range; if ``device`` is missing or not
            of the current accelerator; or if options exclude each other:

            - ``device_transform`` without ``device``;
            - ``worker_pool`` with ``multiprocessing_context``, more workers than it has or a ``Dispatch``, or
              with ``persistent_workers``, unless with ``prefetch_epochs``;
            - ``main_prefetch`` with ``device`` or ``pin_memory``, or without workers;
            - ``worker_method="thread"`` with ``max_shared_bytes``, ``worker_pool``, ``main_prefetch``,
              ``restart_workers``, ``sample_timeout``, ``multiprocessing_context``, a DataPipe or a
              ``Dispatch``;
            - ``worker_task="sample"`` with another ``seeding`` than ``"sample"``, ``Workers`` on a cluster,
              an ``IterableDataset`` or a dataset that has a ``state_dict``;
            - ``last_batch`` with ``batch_size=None`` or a ``batch_sampler`` that does otherwise, or with
              ``drop_last``, unless ``"discard"``;
            - ``last_batch="rollover"`` with an ``IterableDataset``;
            - ``worker_reset_fn`` with a ``Dispatch``;
            - ``seed`` without ``worker_reset_fn`` or ``seeding``;
            - ``restart_workers`` with ``Workers`` on a cluster or a ``Dispatch``;
            - ``on_error`` with a ``Dispatch``;
            - ``on_error="retry"`` with an ``IterableDataset``;
            - ``max_errors`` without ``on_error``;
            - ``sample_timeout`` with ``Workers`` on a cluster, a ``Dispatch`` or an ``IterableDataset``;
            - ``num_workers="auto"`` with ``seeding="torch"`` or ``"epoch"`` or ``Workers`` on a cluster;
            - ``prefetch_epochs`` with an ``IterableDataset``, a dataset that has a ``state_dict`` or threads
              over a dataset that has ``set_epoch``, or without ``persistent_workers`` or ``worker_pool``.
        TypeError: If a value has the wrong type.
    """

    # Make the features that are on in each iterator of a subclass.
    _ringloader_always: ClassVar[tuple[Any, ...]] = ()

    #: The bad samples of the epoch that began last, from batches that were handed out, in their order.
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
        noted = report.noted(self)
        path = "not iterated yet" if noted is None else f"path {noted.path}"
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
        iterator = make_iterator(self, loader_options.of(self), here)
        if not isinstance(iterator, pausing.Pausing):
            torchs, iterator = iterator, TorchsIterator(iterator)
            report.pass_on(self, torchs, iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch that begins next, in samplers and datasets that have ``set_epoch``.

        In this process, ``set_epoch`` is called at once: of the loader's ``sampler``, its ``batch_sampler``,
        the batch sampler's ``sampler``, the dataset, and datasets inside torch's ``Subset``,
        ``ConcatDataset``, ``ChainDataset`` or ``StackDataset``.

        Persistent workers, and workers of a ``worker_pool``, call the ``set_epoch`` of their dataset when
        their next epoch begins; an error of it is the error of that epoch's batches. They get the epoch of
        their own loader, whatever other loaders of the dataset have set. Other workers get the dataset as it
        is when they start. ``Seeds`` are of that epoch, and count up from it in epochs without a call.

        Args:
            epoch: The epoch, from 0 on.

        Raises:
            TypeError: If it is no int.
            ValueError: If it is negative.
        """
        epochs.set_next(self, epoch)

    def epoch_stats(self) -> EpochStats:
        """Returns the figures of the epoch that runs or ran last: where its time went, and what to change.

        Needs ``stats=True``. For a loader of another class, ``ringloader.epoch_stats(loader)``.

        Returns:
            The figures until the last call of ``next``. They do not change any more.

        Raises:
            RuntimeError: If the loader's last epoch had no ``stats=True``, or it was not iterated yet.
        """
        return epoch_stats(self)

    def call_workers(self, fn: Callable[..., _T], *args: Any, timeout: float | None = None) -> list[_T]:
        """Calls ``fn(dataset, *args)`` in each living worker, and returns the results in the workers' order.

        Waits for all of them. A worker calls ``fn`` in its main thread between two batches, behind the
        batches that it was asked for before, so batches that come after the call may be older.
        ``get_worker_info()`` works in it, and its dataset is the one that is passed. Function, arguments and
        results are pickled, and tensors copied, unless workers are threads. Without workers this process
        calls ``fn``, with its dataset.

        Args:
            fn: The function. It goes by its name: the worker's module must have had it when the worker
                started.
            *args: Further arguments of ``fn``.
            timeout: Seconds to wait (default: the loader's ``timeout``, and if that is 0, no limit).

        Raises:
            Exception: An error of ``fn``, as torch raises a worker's error; of several, the first worker's.
            RuntimeError: If no worker lives, one ends meanwhile, or does not answer in time: it then still
                calls the function later. If batches travel by torch's own transport.
            pickle.PicklingError: If the function, or an argument, cannot be sent to worker processes.
        """
        from ringloader._features.calls import calls

        return calls.call_workers(self, shutdown.alive(self), fn, args, timeout)

    def shutdown(self) -> None:
        """Ends this loader's iterators and workers now, and gives back the memory that it keeps.

        Persistent workers end too, and workers of an iterator that you still hold: ``next`` on it raises a
        ``RuntimeError`` from then on. Batches that were returned stay valid. The loader may be iterated
        again, with new workers, and be shut down again. Any thread may call it: a ``next`` that waits in
        another thread raises that error too. Busy workers have 5 seconds to end, all of them together; then
        they are terminated. In a forked child, the parent's workers and memory are left alone.

        ``with DataLoader(...) as loader:`` calls it at the end of the block, however that ends.
        """
        shutdown.shut_down(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


at_exit.expect_loaders()
loader_options.show(DataLoader, [name for name, about in TABLE.items() if not about.is_of_states])
# torch's arguments after the dataset, with their defaults.
_TORCHS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in ("self", "dataset") and (name not in TABLE or TABLE[name].is_torchs)
}


def make(loader: DataLoader[Any], arguments: dict[str, Any]) -> None:
    """Makes a loader of the arguments of its constructor, by their names."""
    construct(loader, super(DataLoader, loader).__init__, _TORCHS, arguments)
