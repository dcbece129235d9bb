"""The rules which options exclude each other, or do not go with a loader: one list, with the errors.

The constructor, ``convert``, ``install`` and the environment know no other. Imports no torch: a rule asks for
``Facts`` of a loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ringloader._core.checks import AUTO, THREAD
from ringloader._core.conflict import Conflict, Facts, of_loader, of_options
from ringloader._features.about import About, Never
from ringloader.bad_samples import raises_first, retries

_AS_THREADS = f'"{THREAD}"'
_AS_SAMPLES = '"sample"'
_AS_AUTO = '"auto"'

Seeds = Literal["torch", "epoch", "sample", "batch"]


def _with_dispatch(option: str, why: str) -> Conflict:
    return of_loader(
        option, "with a `Dispatch`", lambda _, facts: facts.is_dispatch, "a Dispatch as dataset", why
    )


def _with_threads(option: str, default: Any, why: str) -> Conflict:
    """Returns the rule for an option that raises where workers are threads."""
    return of_options(
        "worker_method",
        f"with `{option}`",
        lambda options: options.worker_method == THREAD and getattr(options, option) != default,
        f"worker_method={THREAD!r} and {option}={{options.{option}!r}} do not go together: {why}; leave one "
        "of them out",
        _AS_THREADS,
    )


def _needs_seed(options: Any) -> object:
    return options.worker_reset_fn is not None or seeds_of(options) != "torch"


def seeds_of(options: Any) -> Seeds:
    """Returns ``seeding``, or what it is by default."""
    by_default: Seeds = "sample" if options.worker_task == "sample" or _is_auto(options) else "torch"
    return options.seeding or by_default


def _is_auto(options: Any) -> bool:
    return bool(options.num_workers == AUTO)


def _shares(options: Any) -> bool:
    return bool(options.worker_task == "sample")


def _with_sharing(option: str, is_there: Callable[[Any], object], why: str) -> Conflict:
    """Returns the rule for an option that raises where all workers make one batch."""
    return of_options(
        "worker_task",
        f"with `{option}`",
        lambda options: _shares(options) and is_there(getattr(options, option)),
        f"worker_task='sample' and {option}={{options.{option}!r}} do not go together: {why}; leave one "
        "of them out",
        _AS_SAMPLES,
    )


def _has_threads(options: Any, facts: Facts) -> object:
    return options.worker_method == THREAD and (_is_auto(options) or facts.loader.num_workers > 0)


def _is_without_workers(options: Any, facts: Facts) -> object:
    # With a pool, a loader that says no number has as many workers as the pool.
    return facts.loader.num_workers == 0 and options.worker_pool is None and not _is_auto(options)


def _differs_from_batch_sampler(options: Any, facts: Facts) -> object:
    loader = facts.loader
    return (
        loader.batch_sampler is not None
        and loader.batch_size is None
        and facts.last_batch != options.last_batch
    )


def _has_remote_pool(options: Any) -> object:
    return options.worker_pool is not None and options.worker_pool._is_remote


_OF_OPTIONS = (
    of_options(
        "restart_workers",
        "with `Workers` on a cluster",
        _has_remote_pool,
        "restart_workers={options.restart_workers} and worker_pool={options.worker_pool!r} do not go "
        "together: lost workers of a cluster are always replaced; set retries= of Workers instead",
    ),
    of_options(
        "sample_timeout",
        "with `Workers` on a cluster",
        _has_remote_pool,
        "sample_timeout={options.sample_timeout} and worker_pool={options.worker_pool!r} do not go together: "
        "only workers of this machine are ended for a sample; leave sample_timeout out, or use timeout",
    ),
    of_options(
        "device_transform",
        "without `device`",
        lambda options: options.device is None,
        "device_transform needs device: pass the device that its batches are to be on",
    ),
    of_options(
        "main_prefetch",
        "with `device`",
        lambda options: options.device is not None,
        "main_prefetch={options.main_prefetch} and device={options.device!r} do not go together: batches for "
        "a device are prepared before their turn anyway; say with device_prefetch how many",
    ),
    of_options(
        "worker_task",
        'with another `seeding` than `"sample"`',
        lambda options: _shares(options) and options.seeding not in (None, "sample"),
        "worker_task='sample' and seeding={options.seeding!r} do not go together: which worker makes a "
        "sample depends on timing, so random numbers must be the sample's; leave seeding out",
        _AS_SAMPLES,
    ),
    of_options(
        "worker_task",
        "with `Workers` on a cluster",
        lambda options: _shares(options) and _has_remote_pool(options),
        "worker_task='sample' and worker_pool={options.worker_pool!r} do not go together: workers on other "
        "machines cannot have parts of one batch in a memory that they share; leave worker_task out",
        _AS_SAMPLES,
    ),
    of_options(
        "num_workers",
        'with `seeding="torch"` or `"epoch"`',
        lambda options: _is_auto(options) and options.seeding in ("torch", "epoch"),
        f"num_workers={AUTO!r} and seeding={{options.seeding!r}} do not go together: the numbers of a sample "
        "would depend on how many workers there are; leave seeding out",
        _AS_AUTO,
    ),
    of_options(
        "num_workers",
        "with `Workers` on a cluster",
        lambda options: _is_auto(options) and _has_remote_pool(options),
        f"num_workers={AUTO!r} and worker_pool={{options.worker_pool!r}} do not go together: idle processors "
        "and memory, by which workers are added, are measured on this machine alone; pass a number",
        _AS_AUTO,
    ),
    of_options(
        "seed",
        "without `worker_reset_fn` or `seeding`",
        lambda options: not _needs_seed(options),
        "seed={options.seed} has no effect without worker_reset_fn, or seeding='epoch', 'sample' or 'batch': "
        "for the order of the samples, pass torch's generator",
    ),
    of_options(
        "max_errors",
        "without `on_error`",
        lambda options: raises_first(options.on_error),
        "max_errors={options.max_errors} has no effect with on_error={options.on_error!r}: the first error "
        "is raised; to handle further errors pass on_error='skip', or Retry(then=...)",
    ),
)

_OF_LOADERS = (
    Conflict(
        "worker_pool",
        "with `persistent_workers`, unless with `prefetch_epochs`",
        "made",
        lambda options, facts: (
            facts.loader.persistent_workers
            and not options.prefetch_epochs
            and not options.worker_pool._is_remote
        ),
        "persistent_workers={facts.loader.persistent_workers!r} does not go with worker_pool: an iterator "
        "that persists would keep the pool's processes; leave persistent_workers out, the pool keeps them",
        is_left_aside=True,
    ),
    Conflict(
        "worker_pool",
        "with `multiprocessing_context`",
        "made",
        lambda _, facts: facts.start_method is not None,
        "multiprocessing_context={facts.start_method!r} does not go with worker_pool: the pool starts the "
        "processes; pass start_method to WorkerPool instead",
        is_left_aside=True,
    ),
    Conflict(
        "worker_pool",
        "with more workers than it has",
        "made",
        lambda options, facts: (
            not _is_auto(options) and facts.loader.num_workers > options.worker_pool.num_workers
        ),
        "num_workers={facts.loader.num_workers} is more than the {options.worker_pool.num_workers} processes "
        "of worker_pool; pass num_workers=0 for as many as the pool has, or make a larger WorkerPool",
    ),
    _with_dispatch(
        "worker_pool",
        "its items come from a process of each iterator; leave worker_pool out, and say num_workers",
    ),
    of_loader(
        "main_prefetch",
        "without workers",
        _is_without_workers,
        "num_workers=0",
        "without workers nothing is there to be decoded; use num_workers=1",
    ),
    of_loader(
        "main_prefetch",
        "with `pin_memory`",
        lambda _, facts: facts.loader.pin_memory,
        "pin_memory=True",
        "batches are pinned before their turn in any case; leave main_prefetch out",
    ),
    of_loader(
        "worker_method",
        "with `multiprocessing_context`",
        lambda options, facts: _has_threads(options, facts) and facts.start_method is not None,
        "multiprocessing_context={facts.start_method!r}",
        "threads are not started by a context; leave one of them out",
        _AS_THREADS,
    ),
    of_loader(
        "worker_method",
        "with a DataPipe",
        lambda options, facts: _has_threads(options, facts) and facts.is_data_pipe,
        "a DataPipe as dataset",
        "each worker needs a copy of its graph; leave worker_method out, or use a Dataset",
        _AS_THREADS,
    ),
    of_loader(
        "worker_method",
        "with a `Dispatch`",
        lambda options, facts: _has_threads(options, facts) and facts.is_dispatch,
        "a Dispatch as dataset",
        "its items go to worker processes; leave worker_method out, or pass the source itself with "
        "num_workers=1",
        _AS_THREADS,
    ),
    of_loader(
        "worker_task",
        "with an `IterableDataset`",
        lambda _, facts: facts.is_iterable,
        "an IterableDataset",
        "each worker has an iterator of its own, whose samples no other can make; leave worker_task out",
        _AS_SAMPLES,
    ),
    of_loader(
        "worker_task",
        "with a dataset that has a `state_dict`",
        lambda options, facts: options.snapshot_every_n_steps is not None and facts.is_asked_for_states,
        "a dataset with a state_dict",
        "which samples a worker has made depends on timing, and so would its dataset's state; leave "
        "worker_task out, or pass snapshot_every_n_steps=None",
        _AS_SAMPLES,
    ),
    Conflict(
        "last_batch",
        "with `batch_size=None`",
        "made",
        lambda _, facts: facts.loader.batch_sampler is None,
        "last_batch={options.last_batch!r} and batch_size=None do not go together: without batches there is "
        "no last one; pass a batch_size",
    ),
    Conflict(
        "last_batch",
        "with a `batch_sampler` that does otherwise",
        "made",
        _differs_from_batch_sampler,
        "last_batch={options.last_batch!r} and batch_sampler={facts.loader.batch_sampler!r:.200} do not go "
        "together: a batch sampler says itself what becomes of its last batch; leave last_batch out, or pass "
        "a ringloader.RolloverBatchSampler to roll over",
    ),
    Conflict(
        "last_batch",
        'with `drop_last`, unless `"discard"`',
        "made",
        lambda options, facts: facts.loader.drop_last and options.last_batch != "discard",
        "last_batch={options.last_batch!r} and drop_last={facts.loader.drop_last!r} do not go together: "
        "leave drop_last out",
    ),
    Conflict(
        "last_batch",
        "with an `IterableDataset`",
        "made",
        lambda options, facts: options.last_batch == "rollover" and facts.is_iterable,
        "last_batch='rollover' and an IterableDataset do not go together: its samples have no indices that "
        "could wait for the next epoch; use 'keep' or 'discard'",
        value='"rollover"',
    ),
    _with_dispatch(
        "worker_reset_fn",
        "workers have no dataset that an epoch could begin with; leave one of them out",
    ),
    _with_dispatch(
        "restart_workers",
        "items that a worker had taken are lost with it; leave restart_workers out",
    ),
    _with_dispatch(
        "sample_timeout",
        "items that a worker had taken are lost with it; leave sample_timeout out, or use timeout",
    ),
    of_loader(
        "sample_timeout",
        "with an `IterableDataset`",
        lambda _, facts: facts.is_iterable and not facts.is_dispatch,
        "an IterableDataset",
        "a worker that is ended cannot go on in the middle of its part; use timeout, or watchdog",
    ),
    _with_dispatch(
        "on_error",
        "its items are read in one process for all workers; catch errors in its functions, or leave on_error "
        "out",
    ),
    of_loader(
        "on_error",
        "with an `IterableDataset`",
        lambda options, facts: facts.is_iterable and retries(options.on_error) is not None,
        "an IterableDataset",
        "its next sample would be another one; use 'skip', or a function of the index and the error",
        '"retry"',
    ),
    of_loader(
        "prefetch_epochs",
        "without `persistent_workers` or `worker_pool`",
        lambda _, facts: not (facts.loader.persistent_workers and facts.loader.num_workers > 0),
        "persistent_workers={facts.loader.persistent_workers} with num_workers={facts.loader.num_workers}",
        "workers that end with their epoch can begin no other; pass persistent_workers=True, a worker_pool "
        "to ringloader.DataLoader, or leave prefetch_epochs out",
    ),
    of_loader(
        "prefetch_epochs",
        "with an `IterableDataset`",
        lambda _, facts: facts.is_iterable,
        "an IterableDataset",
        "its iterator would begin again before iter() asks for it, and what it gave to an epoch that is "
        "dropped would be lost; leave prefetch_epochs out",
    ),
    of_loader(
        "prefetch_epochs",
        "with a dataset that has a `state_dict`",
        lambda options, facts: options.snapshot_every_n_steps is not None and facts.is_asked_for_states,
        "a dataset with a state_dict",
        "its state between two epochs would be one of the next; leave prefetch_epochs out, or pass "
        "snapshot_every_n_steps=None",
    ),
    of_loader(
        "prefetch_epochs",
        "with threads over a dataset that has `set_epoch`",
        lambda options, facts: options.worker_method == THREAD and facts.has_set_epoch,
        f"worker_method={THREAD!r} over a dataset with set_epoch",
        "threads share the dataset, which is in one epoch at a time; leave one of them out",
    ),
)


def all_of(table: Mapping[str, About], defaults: Mapping[str, Any]) -> tuple[Conflict, ...]:
    """Returns all rules: of the lists above, and of the columns of ``table``."""
    threads = [
        _with_threads(name, defaults[name], about.in_threads.why)
        for name, about in table.items()
        if isinstance(about.in_threads, Never)
    ]
    return (*threads, *_OF_OPTIONS, *_OF_LOADERS)
