"""The table of options: all there is to know about each, but for the rules that exclude each other.

Imports no torch. `make generate` writes signatures, docstrings and pages from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import ringloader.bad_samples as bad_samples
from ringloader._options import checks, rules
from ringloader._options.about import About, Never, given_of
from ringloader._options.rule import checked_when, raise_first

if TYPE_CHECKING:
    import torch

    from ringloader.seeds import Seeds


def _option(default: Any, **about: Any) -> Any:
    return dataclasses.field(default=default, metadata={"about": About(**about)})


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, with all checks that need no torch.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """

    # The names of the options that have another value than their default. Each object has its own.
    changed: ClassVar[tuple[str, ...]] = ()

    max_shared_bytes: int | None = _option(
        None,
        topic="Memory",
        values="a positive int, or `None`",
        without="`None`, a quarter of what the machine and the control group have left, divided by "
        "`LOCAL_WORLD_SIZE`",
        line="Bytes of shared memory that batches on their way may take, over all workers.",
        details="Each worker has an equal share. A batch larger than half a share travels more slowly, in "
        "memory of its own, which also counts until the main process has taken the batch. A worker with a "
        "batch larger than its share has no other batch on its way. Batches that you hold count up to half "
        "of each share; copies in private memory do not count.",
        page="tuning.md#max_shared_bytes",
        check=checks.integer(1, or_none=True),
        in_threads=Never("threads need no shared memory"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    device: torch.device | str | int | None = _option(
        None,
        topic="Devices",
        values='a `torch.device` of the current accelerator, its name, an index, `"auto"`, or `None`',
        without="`None`, batches stay on the CPU",
        line="Device on which batches arrive, copied on a stream of their own.",
        details='`"auto"` is the current accelerator, or the CPU if there is none, or if a fork has made '
        "it unusable. The stream that is current when a batch is returned waits for its copies. "
        "`pin_memory` then adds nothing. A loader in a worker process leaves its batches on the CPU, and "
        "calls no `device_transform`.",
        page="accelerators.md",
        check=checks.device,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
    )
    device_prefetch: int = _option(
        2,
        topic="Devices",
        values="an int, 0 or more",
        without="2",
        line="How many batches to copy before their turn, in addition to the one that is returned and the "
        "one that the caller still has.",
        details="With 0, the copies of a batch begin when it is asked for. Without workers, and where "
        "torch's own loader runs, no batch is copied early.",
        check=checks.integer(0),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    device_transform: Callable[[Any], Any] | None = _option(
        None,
        topic="Devices",
        values="a callable, or `None`",
        without="`None`",
        line="Function that gets each batch on the device, on the stream of the copies, and returns the "
        "batch for the caller.",
        details="It may run before the batch's turn, and has the gradient mode, autocast and default "
        "device that `iter()` was called in. It runs once for each batch, and again if memory was short or "
        'the program was interrupted. With `device="auto"` and no accelerator it runs on the CPU, in the '
        "batch's turn and the modes of `next()`.",
        check=checks.callable_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
        is_text=False,
    )
    # A `ringloader.WorkerPool`: its module needs torch.
    worker_pool: Any = _option(
        None,
        topic="Speed",
        values="a `ringloader.WorkerPool`, or `None`",
        without="`None`, each iterator starts its own workers",
        line="Pool whose processes are the workers, which several loaders share.",
        details="`num_workers=0` then means as many as the pool has. The loader keeps the pool, and the "
        "pool does not keep the loader.",
        page="pools.md",
        check=checks.worker_pool,
        in_threads=Never("a pool has processes"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        is_text=False,
        annotation="WorkerPool | None",
    )
    main_prefetch: int = _option(
        0,
        topic="Speed",
        values="an int, 0 or more",
        without="0, `next` decodes them",
        line="How many of the batches that workers have ready a thread of the main process decodes before "
        "their turn.",
        details="For batches that are slow to unpickle. No effect where torch's own loader runs.",
        page="iterators.md#prefetch_factor-and-main_prefetch",
        check=checks.integer(0),
        in_threads=Never("what threads make needs no decoding"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    worker_method: Literal["multiprocessing", "thread"] = _option(
        "multiprocessing",
        topic="Speed",
        values='`"multiprocessing"`, `"thread"`',
        without='`"multiprocessing"`',
        line="Kind of workers: processes, or threads of this process.",
        details="All threads use the same dataset object, and a batch is the worker's own object, not a "
        "copy. In a thread, `get_worker_info().rng` has generators with torch's seeds for the worker; the "
        "global ones are the process's and are not seeded. No effect without workers.",
        page="threads.md",
        check=checks.one_of("multiprocessing", checks.THREAD),
        # By `RINGLOADER=off` only. Where a part of torch was replaced, threads are refused before.
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        # The dataset may be one that no process can be sent, or draw from the generators of its thread.
        off_linux="is an error with workers",
    )
    worker_task: Literal["batch", "sample"] = _option(
        "batch",
        topic="Speed",
        values='`"batch"`, `"sample"`',
        without='`"batch"`, a worker makes whole batches, as torch\'s',
        line="Unit of work of a worker: a batch, or samples of the earliest batches, which all workers make.",
        details='With `"sample"` the first batch comes sooner, fewer batches are under way, and a slow '
        "sample holds up its own batch alone. `prefetch_factor` then counts batches over all workers "
        "(default: 4, or as many as give each worker two samples). `collate_fn` runs in the worker that "
        "makes the batch's last samples. A dataset with `__getitems__` and one of plain arrays give whole "
        "batches: any idle worker takes the next. A worker makes as many samples at a time as take about a "
        "millisecond.",
        page="tuning.md#worker_task",
        check=checks.one_of("batch", "sample"),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is an error",
    )
    last_batch: Literal["keep", "discard", "rollover"] | None = _option(
        None,
        topic="Epochs",
        values='`"keep"`, `"discard"`, `"rollover"`, or `None`',
        without="`None`, as torch's `drop_last` says",
        line="Use of samples that fill no whole batch at the end of an epoch: kept, discarded, or carried "
        "over to the next epoch.",
        details='`"keep"` and `"discard"` are torch\'s `drop_last=False` and `True`; with `"rollover"` the '
        "samples open the next epoch, and `len` counts the epoch that begins next. See "
        "`ringloader.RolloverBatchSampler`.",
        page="epochs.md#the-last-batch",
        check=checks.last_batch,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        instead="give the loader a ringloader.RolloverBatchSampler",
    )
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = _option(
        None,
        topic="Epochs",
        values="a callable, or `None`",
        without="`None`",
        line="Function that each worker calls when an epoch begins, before its first batch, as "
        "`worker_reset_fn(dataset, worker_info, seeds)`, with torch's `WorkerInfo` and `ringloader.Seeds`.",
        details="It returns the dataset of that epoch, or None for the same one. Its error is the error of "
        "the epoch's batches. Without workers the main process calls it, as a single worker 0.",
        page="epochs.md#when-an-epoch-begins",
        check=checks.callable_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
        is_text=False,
        is_called_in_workers=True,
    )
    seeding: Literal["torch", "epoch", "sample", "batch"] | None = _option(
        None,
        topic="Randomness",
        values='`"torch"`, `"epoch"`, `"sample"`, `"batch"`, or `None`',
        without='`None`, `"sample"` with `worker_task="sample"` or `num_workers="auto"`, else `"torch"`: '
        "when a worker starts",
        line="When the generators of `random`, `numpy.random` and torch's CPU are seeded.",
        details='With `"epoch"` each worker sets them when an epoch begins, from `ringloader.Seeds`; without '
        'workers it has no effect. With `"sample"` they are set before each sample, from `seed`, the epoch '
        'and the sample\'s place in it; with `"batch"` before each batch, from the place of its first '
        "sample. So random augmentation is the same for any number and kind of workers, restarted ones too, "
        'and for `"sample"` for any `batch_size`. With a `DistributedSampler` a place is that among the '
        "samples of all ranks; else each rank has keys of its own. `collate_fn` has a key of its batch. A "
        "dataset with `__getitems__` draws for its batch from the key of the first sample. Each worker of "
        "an `IterableDataset` counts its own samples. In a thread, those of `get_worker_info().rng` are "
        "set. Without workers the program's generators are put back before `next` returns. Each task goes "
        "to the worker with the fewest unanswered ones, unless the dataset is iterable or has a "
        "`state_dict`; batches come in their order.",
        page="seeds.md#the-same-augmentation-for-any-workers",
        check=checks.one_of("torch", "epoch", "sample", "batch", or_none=True),
        as_default=("torch",),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
    )
    seed: int | None = _option(
        None,
        topic="Randomness",
        values="an int, 0 or more, or `None`",
        without="`None`, torch's base seed, which each process draws",
        line="Number that `ringloader.Seeds` and `seeding` come from, the same in all ranks.",
        details="The order of the samples does not depend on it.",
        check=checks.seed,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="works",
    )
    restart_workers: int = _option(
        0,
        topic="Errors",
        values="an int, 0 or more",
        without="0, the error is torch's",
        line="How many crashed workers to restart per epoch.",
        details="The successor does the tasks that the worker had not delivered, so no batch is lost, and "
        "none comes twice. It has the worker's number and seed, and the dataset as it then is in the main "
        "process, and calls `worker_init_fn`; its generators begin anew, so random augmentation may "
        "differ. A sample that crashes its worker again is an error for `on_error`. Workers of an "
        "`IterableDataset` are not restarted.",
        page="restarts.md",
        check=checks.integer(0),
        in_threads=Never("a thread is lost only with the process"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    on_error: bad_samples.OnError = _option(
        bad_samples.RAISE,
        topic="Errors",
        values='`"raise"`, `"skip"`, `"retry"`, a `ringloader.Retry`, or a callable',
        without='`"raise"`, as torch does',
        line="Handling of samples that raise: raise their error, skip them, try again, or call a function.",
        details='`"skip"` leaves the sample out of its batch, and leaves out a batch without samples. The '
        "worker calls a function as `on_error(index, error)`; it returns another sample, or raises.",
        page="bad_samples.md",
        check=bad_samples.check_on_error,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is an error",
        is_called_in_workers=True,
    )
    max_errors: int | None = _option(
        None,
        topic="Errors",
        values="an int, 0 or more, or `None`",
        without="`None`, any number",
        line="How many samples per epoch `on_error` may skip or replace; one more raises its error.",
        details="A batch that `collate_fn` cannot make counts as one.",
        check=checks.integer(0, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
    )
    sample_timeout: float | None = _option(
        None,
        topic="Errors",
        values="a number of seconds, more than 0, or `None`",
        without="`None`, no limit",
        line="Seconds that one sample, or a batch's `collate_fn`, may take in a worker; then it is an error.",
        details="The worker process is ended, and another one makes the rest of its batch again, without "
        "counting for `restart_workers`. The error is a `TimeoutError` of the sample, for which `on_error` "
        "decides. No effect without workers.",
        page="watchdog.md#sample_timeout",
        check=checks.seconds_or_none,
        in_threads=Never("a thread cannot be ended"),
        in_pool="is undone",
        in_worker="works",
        on_torchs="is left out",
    )
    watchdog: float | None = _option(
        None,
        topic="Errors",
        values="a number of seconds, more than 0, or `None`",
        without="`None`, never",
        line="Seconds without a batch after which the logger `ringloader` names each late worker, its "
        "batch, for how long it has been in it, and its Python stack.",
        details="It does so again each time the wait has doubled. No effect without workers.",
        page="watchdog.md",
        check=checks.seconds_or_none,
        in_threads="works",
        in_pool="is undone",
        in_worker="works",
        on_torchs="is left out",
    )

    stats: bool = _option(
        False,
        topic="Speed",
        values="`True`, `False`",
        without="`False`",
        line="`True` to note where the time of each epoch goes, for `epoch_stats()`.",
        page="guides/is_it_the_loader.md",
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        # The clock is native.
        off_linux="is left out",
    )
    snapshot_every_n_steps: int | None = _option(
        1,
        topic="Resume",
        values="a positive int, or `None`",
        without="1",
        line="After how many batches workers take the state of a dataset, or its iterator, that has "
        "`state_dict` and `load_state_dict`.",
        details="An epoch that goes on reads batches again that came since. With `None` never, and the "
        "dataset counts as one without a state.",
        page="guides/resuming.md#datasets-with-a-state",
        check=checks.integer(1, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        instead="use ringloader.StatefulDataLoader, whose loaders have a state",
        is_of_states=True,
    )

    num_workers: Literal["auto"] | None = _option(
        None,
        topic="Speed",
        values='`"auto"`, or a number as with torch',
        without="0, the caller makes them",
        line='How many workers make batches. With `"auto"` the loader finds the number, and changes it while '
        "it runs.",
        details='Batches are the same for any number, so `seeding` is `"sample"` by default. The loader '
        "begins with one worker, and adds more as long as the caller waits for batches and processors and "
        "memory are left; one that brings too little is ended. `loader.num_workers` is then the number that "
        "runs, and before the first `iter` the bound: the processors of this process, divided by "
        "`LOCAL_WORLD_SIZE`, less one for the caller where there are more than two. Workers that mostly wait "
        "may be four times as many, up to 64, and no more than a `worker_pool` has. An `IterableDataset`, a "
        "dataset that has a `state_dict`, and torch's own loader have the bound.",
        page="tuning.md#num_workersauto",
        check=checks.auto_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
        is_torchs=True,
    )
    prefetch_epochs: bool = _option(
        False,
        topic="Speed",
        values="`True`, `False`",
        without="`False`, `iter` begins it",
        line="`True` to begin the next epoch of persistent workers when the last indices of this one have "
        "been sent, so that `iter` finds its first batches ready.",
        details="Its sampler then draws earlier than torch's, also after the last epoch of the program. "
        "With a `worker_pool` the loader keeps its processes, as with `persistent_workers`.",
        page="prefetch_epochs.md",
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )

    def __post_init__(self) -> None:
        given = given_of(vars(self), DEFAULTS)
        for name, value in given.items():
            TABLE[name].check(name, value)
        changed = tuple(
            name
            for name, value in given.items()
            if value != DEFAULTS[name] and value not in TABLE[name].as_default
        )
        vars(self)["changed"] = changed
        if changed:
            raise_first(_GIVEN, self, changed)

    @property
    def seeds(self) -> rules.Seeds:
        """``seeding``, or what it is by default."""
        return rules.seeds_of(self)

    @property
    def seeds_by_place(self) -> Literal["sample", "batch"] | None:
        """The part of an epoch before which generators are set by its place, or None."""
        seeds = self.seeds
        return seeds if seeds == "sample" or seeds == "batch" else None


# The rows by name, in the order of the constructor's arguments.
TABLE: dict[str, About] = {field.name: field.metadata["about"] for field in dataclasses.fields(Options)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Options)}
RULES = rules.all_of(TABLE, DEFAULTS)
_GIVEN = checked_when("given", RULES)
