"""The table of options: all there is to know about each, but for the rules that exclude each other.

Imports no torch. `make generate` writes signatures, docstrings and pages from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import ringloader.bad_samples as bad_samples
from ringloader._options import checks, rules
from ringloader._options.about import About, Never

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

    max_shared_bytes: int | None = _option(
        None,
        values="a positive int, or `None`",
        without="`None`: a quarter of the memory that is left, divided by `LOCAL_WORLD_SIZE`",
        line="The bytes of shared memory that batches on their way may take, over all workers; "
        "[tuning](tuning.md#max_shared_bytes).",
        check=checks.integer(1, or_none=True),
        in_threads=Never("threads need no shared memory"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        is_read_again=True,
    )
    device: torch.device | str | int | None = _option(
        None,
        values='a `torch.device` of the current accelerator, its name, an index, `"auto"`, or `None`',
        without="`None`",
        line='The device on which batches arrive, copied on a stream of their own. `"auto"` is the CPU if '
        "there is no accelerator. No effect in worker processes.",
        check=checks.device,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
    )
    device_prefetch: int = _option(
        2,
        values="an int, 0 or more",
        without="2",
        line="How many batches to copy before their turn. They wait on the device, which has up to 2 more. "
        "With 0, the copies of a batch begin when it is asked for.",
        check=checks.integer(0),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    device_transform: Callable[[Any], Any] | None = _option(
        None,
        values="a callable, or `None`",
        without="`None`",
        line="A function that gets each batch on the device, on the stream of the copies, and returns the "
        "batch for the caller. Needs `device`. After out of memory or an interrupt it may be called again "
        "for the same batch. Not as text.",
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
        values="a `ringloader.WorkerPool`, or `None`",
        without="`None`: each iterator starts its own workers",
        line="A pool of workers that several loaders share; [details](pools.md). Not as text.",
        check=checks.worker_pool,
        in_threads=Never("a pool has processes"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        is_text=False,
    )
    worker_prefetch: int | None = _option(
        None,
        values="a positive int, or `None`",
        without="`None`: torch's `prefetch_factor`",
        line="How many batches each worker has ready or under way: torch's `prefetch_factor` by its name "
        "in torchdata; [details](iterators.md#worker_prefetch-and-main_prefetch). `ringloader.DataLoader` "
        "only.",
        check=checks.integer(1, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        instead="set torch's prefetch_factor there",
    )
    main_prefetch: int = _option(
        0,
        values="an int, 0 or more",
        without="0",
        line="How many batches a thread of the main process decodes before their turn. Not with `device` "
        "or `pin_memory`.",
        check=checks.integer(0),
        in_threads=Never("what threads make needs no decoding"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    worker_method: str = _option(
        "multiprocessing",
        values='`"multiprocessing"`, `"thread"`',
        without='`"multiprocessing"`',
        line="The kind of workers: processes, or threads of this process; [details](threads.md). No effect "
        "without workers.",
        check=checks.one_of("multiprocessing", checks.THREAD),
        # By `RINGLOADER=off` only. Where a part of torch was replaced, threads are refused before.
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    last_batch: Literal["keep", "discard", "rollover"] | None = _option(
        None,
        values='`"keep"`, `"discard"`, `"rollover"`, or `None`',
        without="`None`: as torch's `drop_last` says",
        line="Samples that fill no whole batch at the end of an epoch: kept, discarded, or carried over to "
        "the next epoch; [details](epochs.md#the-last-batch). `ringloader.DataLoader` only.",
        check=checks.last_batch,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        instead="give the loader a ringloader.RolloverBatchSampler",
    )
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = _option(
        None,
        values="a callable, or `None`",
        without="`None`",
        line="A function that each worker calls when an epoch begins. It may return another dataset for "
        "that epoch; [details](epochs.md#when-an-epoch-begins). Not as text.",
        check=checks.callable_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
        is_text=False,
        is_called_in_workers=True,
    )
    reseed_workers: bool = _option(
        False,
        values="`True`, `False`",
        without="`False`",
        line="`True`: seed the generators of python, numpy and torch again in each worker when an epoch "
        "begins.",
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error with workers",
    )
    seeding: Literal["torch", "sample", "batch"] = _option(
        "torch",
        values='`"torch"`, `"sample"`, `"batch"`',
        without='`"torch"`: when a worker starts',
        line="When the generators of python, numpy and torch are seeded. Before each sample, or each batch, "
        "they are set from its place in the epoch: then random augmentation is the same for any number of "
        "workers; [details](epochs.md#the-same-augmentation-for-any-workers).",
        check=checks.one_of("torch", "sample", "batch"),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
    )
    seed: int | None = _option(
        None,
        values="an int, 0 or more, or `None`",
        without="`None`: torch's base seed",
        line="The number that `ringloader.Seeds`, and the seeds of `seeding`, come from, the same in all "
        "ranks. Needs `worker_reset_fn`, `reseed_workers` or `seeding`.",
        check=checks.seed,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="works",
    )
    restart_workers: int = _option(
        0,
        values="an int, 0 or more",
        without="0",
        line="How many crashed workers to restart per epoch; [details](restarts.md).",
        check=checks.integer(0),
        in_threads=Never("a thread is lost only with the process"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    on_error: bad_samples.OnError = _option(
        bad_samples.RAISE,
        values='`"raise"`, `"skip"`, `"retry"`, a `ringloader.Retry`, or a callable',
        without='`"raise"`',
        line="Samples that raise: raise their error, skip them, try again, or call a function; "
        "[details](bad_samples.md). A function cannot be given as text.",
        check=bad_samples.check_on_error,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is an error",
        is_called_in_workers=True,
    )
    max_errors: int | None = _option(
        None,
        values="an int, 0 or more, or `None`",
        without="`None`: any number",
        line="How many samples per epoch `on_error` may skip or replace. Needs `on_error`. A batch that "
        "`collate_fn` cannot make counts as one.",
        check=checks.integer(0, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
    )
    watchdog: float | None = _option(
        None,
        values="a number of seconds, more than 0, or `None`",
        without="`None`: never",
        line="Seconds without a batch after which the log names each late worker, its batch, for how long "
        "it has been in it, and its Python stack; [details](watchdog.md).",
        check=checks.seconds_or_none,
        in_threads="works",
        in_pool="is undone",
        in_worker="works",
        on_torchs="is left out",
    )

    stats: bool = _option(
        False,
        values="`True`, `False`",
        without="`False`",
        line="`True`: note where the time of each epoch goes, for `epoch_stats()`; "
        "[details](guides/is_it_the_loader.md).",
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
    )
    snapshot_every_n_steps: int | None = _option(
        1,
        values="a positive int, or `None`",
        without="1",
        line="After how many batches workers take the state of a dataset that has a `state_dict`; "
        "[details](guides/resuming.md#datasets-with-a-state). `None`: never. "
        "`ringloader.StatefulDataLoader` only.",
        check=checks.integer(1, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        instead="use ringloader.StatefulDataLoader, whose loaders have a state",
        is_of_states=True,
    )

    prefetch_epochs: bool = _option(
        False,
        values="`True`, `False`",
        without="`False`",
        line="`True`: begin the next epoch when the last indices of this one have been sent, so that `iter` "
        "finds its first batches ready. Needs `persistent_workers` or `worker_pool`; "
        "[details](epochs.md#no-stall-between-epochs).",
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )

    def __post_init__(self) -> None:
        for name, about in TABLE.items():
            about.check(name, getattr(self, name))
        rules.check(_GIVEN, self, self.changed())

    def changed(self) -> tuple[str, ...]:
        """Returns the names of the options that have another value than their default."""
        return tuple(name for name, default in DEFAULTS.items() if getattr(self, name) != default)


# The rows by name, in the order of the constructor's arguments.
TABLE: dict[str, About] = {field.name: field.metadata["about"] for field in dataclasses.fields(Options)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Options)}
RULES = rules.all_of(TABLE, DEFAULTS)
_GIVEN = rules.checked_when("given", RULES)
