"""Which iterator a loader gets, and the note of its path."""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ringloader._dispatch.dataset import Dispatch
from ringloader._launch import pool
from ringloader._main import epochs, forgotten_epoch
from ringloader._options import THREAD, Options, check_with
from ringloader._report import report
from ringloader._torch import internals, iterating, replacements, select_path
from ringloader._worker.bad_samples import Handling
from ringloader._worker.epochs import EpochStep
from ringloader.bad_samples import RAISE, retries


def make_iterator(loader: Any, options: Options, without_ours: Any, fall_back: Callable[[], Any]) -> Any:
    """The iterator of any torch loader, and the note of the path that it takes.

    Args:
        loader: A ``torch.utils.data.DataLoader``.
        options: How its batches travel, where they travel over the rings.
        without_ours: ``DataLoader._get_iterator`` without our hook: torch's own, or a replacement.
        fall_back: Makes the iterator where they do not. It may come to a hook further down, beneath a
            wrapper, which takes another path and notes that one.
    """
    if options.device is not None and internals.is_in_worker():
        # A loader that a dataset has. Workers have no device, and what they send is moved in the end.
        options = dataclasses.replace(options, device=None, device_transform=None)
    check_dispatch(loader, options)
    check_retry(loader, options)
    forgotten_epoch.note(loader)
    if options.worker_method == THREAD and loader.num_workers > 0:
        check_threads(loader)
        why_not = select_path.reason_against_threads(without_ours)
        if why_not is not None:
            raise RuntimeError(f"worker_method='thread' cannot be had: {why_not}; leave worker_method out")
        return iterating.get_iterator(
            without_ours, loader, functools.partial(_make_threads_iterator, options)
        )
    reason = select_path.reason_for_torch(loader, without_ours)
    if reason is None:
        return iterating.get_iterator(without_ours, loader, functools.partial(_make_rings_iterator, options))
    if loader.num_workers > 0:
        _say_no_restarts(options)
        _say_no_watchdog(options)
    before = report.noted(loader)
    begins = options.worker_reset_fn is not None or options.reseed_workers
    if options.device is None and options.on_error == RAISE and not begins:
        iterator, counters = fall_back(), None
        _put_steps(loader, options, iterator)
    else:
        iterator, counters = _make_torchs_iterator(loader, options, without_ours, fall_back)
    if report.noted(loader) is before:
        if reason.warning is not None:
            select_path.say_once(reason.warning)
        report.record(loader, iterator, "torch", reason.text, counters or dict)
    return iterator


def make_as_far_as_it_fits(
    loader: Any, options: Options, without_ours: Any, fall_back: Callable[[], Any]
) -> Any:
    """As :func:`make_iterator`, for options that were meant for all loaders.

    How the workers of ``loader`` are started, and where its batches go, is its own to say: an option that
    does not go with that is left aside, and the note says which and why.
    """
    aside = []
    if options.worker_method == THREAD and loader.num_workers > 0:
        try:
            check_threads(loader)
        except ValueError as error:
            options = dataclasses.replace(options, worker_method=Options.worker_method)
            select_path.say_once(f"install(worker_method={THREAD!r}) leaves a loader its processes: {error}")
            aside.append(str(error))
    if options.main_prefetch and loader.num_workers > 0:
        try:
            check_with(loader, options)
        except ValueError as error:
            options = dataclasses.replace(options, main_prefetch=Options.main_prefetch)
            aside.append(str(error))
    while (against := _against_retry(loader, options) or _against_dispatch(loader, options)) is not None:
        names, text = against
        options = dataclasses.replace(options, **{name: getattr(Options, name) for name in names})
        aside.append(text)
    made = make_iterator(loader, options, without_ours, fall_back)
    for text in aside:
        report.add(loader, text)
    return made


def _say_no_restarts(options: Options) -> None:
    if options.restart_workers:
        select_path.say_once("restart_workers has no effect where torch schedules")


def _say_no_watchdog(options: Options) -> None:
    if options.watchdog is not None:
        select_path.say_once("watchdog has no effect where batches travel by torch's own transport")


def _make_torchs_iterator(
    loader: Any, options: Options, without_ours: Any, fall_back: Callable[[], Any]
) -> tuple[Any, Callable[[], Mapping[str, int]] | None]:
    """An iterator of torch's that does what the options say, and its counters."""
    from ringloader._main import bad_samples, stages, through

    passes = stages.stages_for(loader, options)
    moving = stages.moving_for(options)
    handling = bad_samples.step_for(options)
    if internals.is_torchs_own(without_ours, "DataLoader._get_iterator"):
        begins = epochs.step_for(loader, options)
        steps = [step for step in (handling, begins) if step is not None]
        view = functools.partial(through.view_for, moving=moving, steps=steps)
        made = iterating.get_iterator_of_torch(without_ours, loader, view)
    else:
        before = report.noted(loader)
        made = fall_back()
        if report.noted(loader) is not before:
            # A hook further down has seen to it.
            return made, None
        begins = epochs.step_for(loader, options)
        if begins is not None and not hasattr(made, "_dataset_fetcher"):
            raise RuntimeError(
                "worker_reset_fn and reseed_workers cannot take effect: DataLoader._get_iterator was replaced"
            )
        if handling is not None:
            raise RuntimeError("on_error cannot take effect: DataLoader._get_iterator was replaced")
    if begins is not None and loader.num_workers == 0:
        epochs.begin_without_workers(made, loader, begins)
    _put_steps(loader, options, made)
    collecting = bad_samples.collecting_for(loader, options)
    counts = None if moving is None else moving.counts
    return through.through(made, moving, passes, collecting), counts


def _put_steps(loader: Any, options: Options, iterator: Any) -> None:
    """Has an iterator without workers fetch as the loader's workers would."""
    if loader.num_workers == 0 and (internals.missing_name() is None or options.on_error != RAISE):
        from ringloader._main import stages

        if options.on_error != RAISE and not replacements.has_own_fetcher(iterator):
            raise RuntimeError("on_error cannot take effect: torch's iterator was replaced")
        stages.put_steps(iterator, stages.fetch_steps_for(loader, options))


def _make_rings_iterator(options: Options, loader: Any) -> Any:
    """Stands in for torch's iterator class."""
    from ringloader._launch import processes

    with processes.one_start_at_a_time():
        return _make_rings_iterator_alone(options, loader)


def _make_rings_iterator_alone(options: Options, loader: Any) -> Any:
    from ringloader._main import (
        bad_samples,
        budget,
        restarting,
        ring_iterator,
        stages,
        through,
        transport,
        transport_iterator,
        watching,
    )

    made: Any
    passes, moving = stages.stages_for(loader, options), stages.moving_for(options)
    steps = stages.steps_for(loader, options)
    moved_to = None if moving is None else moving.device_type
    lease = None
    # Before torch's constructor, which draws: after it there is no way back.
    told: tuple[Any, ...] = ()
    if options.worker_pool is not None and pool.takes(options.worker_pool, loader):
        told = epochs.telling_for(loader)
    try:
        if options.worker_pool is not None and pool.takes(options.worker_pool, loader):
            # Before the memory, which a process that is forked now would have too.
            lease = options.worker_pool._lend(loader)
            steps = (*told, *steps)
        made_transport = transport.make_transport(
            loader, options.max_shared_bytes, steps, moved_to, lease, options.watchdog
        )
    except (OSError, ValueError) as error:
        if lease is not None:
            lease.close()
        if _is_for_descriptors(error):
            # torch's transport needs no fewer of them, and leaves workers behind where its start fails.
            raise
        reason = f"shared memory could not be had: {error}{budget.limits_behind(error)}"
        select_path.say_once(f"{reason}; batches travel by torch's own transport")
        _say_no_watchdog(options)
        alone = [step for step in steps if isinstance(step, (Handling, EpochStep))]
        made = internals.Iterator(through.view_for(loader, moving, alone))
        made = through.through(made, moving, passes, bad_samples.collecting_for(loader, options))
        report.record(loader, made, "torch", reason, dict if moving is None else moving.counts)
        return made
    counters = functools.partial(_counters, made_transport, None if moving is None else moving.counts)
    why_rings = select_path.reason_for_rings(loader)
    collecting = bad_samples.collecting_for(loader, options)
    if why_rings is None:
        if moving is not None:
            moving.find_registrations = made_transport.registrations
        again = None
        if options.restart_workers:
            is_iterable = loader._dataset_kind == internals.ITERABLE
            again = restarting.Restarting(options.restart_workers, is_iterable, made_transport)
        rings = ring_iterator.RingIterator if options.watchdog is None else watching.WatchedRingIterator
        try:
            made = rings(loader, made_transport, passes, moving, collecting, options.main_prefetch, again)
        except OSError as error:
            _is_for_descriptors(error)
            raise
        report.record(loader, made, "native", "native scheduling over shared-memory rings", counters)
    else:
        _say_no_restarts(options)
        torchs = transport_iterator.TransportIterator
        if options.watchdog is not None:
            torchs = watching.WatchedTransportIterator
        made = torchs(loader, made_transport, passes, moving, collecting)
        report.record(loader, made, "rings", why_rings, counters)
    return made


def _is_for_descriptors(error: Exception) -> bool:
    """Whether too many files are open, which the error then says to the user."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return False
    error.add_note("Too few file descriptors are left: raise the limit (ulimit -n), or use fewer workers.")
    return True


def _make_threads_iterator(options: Options, loader: Any) -> Any:
    """As :func:`_make_rings_iterator`, with threads for workers."""
    from ringloader._main import bad_samples, stages, transport_iterator, watching
    from ringloader._threads import iterator, transport

    passes, moving = stages.stages_for(loader, options), stages.moving_for(options)
    made_transport = transport.make_transport(loader, stages.steps_for(loader, options), options.watchdog)
    counters = functools.partial(_counters, made_transport, None if moving is None else moving.counts)
    why_torchs = select_path.reason_for_rings(loader)
    collecting = bad_samples.collecting_for(loader, options)
    made: Any
    if why_torchs is None:
        native = iterator.ThreadIterator if options.watchdog is None else iterator.WatchedThreadIterator
        made = native(loader, made_transport, passes, moving, collecting)
    else:
        torchs = transport_iterator.TransportIterator
        if options.watchdog is not None:
            torchs = watching.WatchedTransportIterator
        made = torchs(loader, made_transport, passes, moving, collecting)
    reason = why_torchs or "native scheduling, with threads for workers"
    report.record(loader, made, "threads", reason, counters)
    return made


def _counters(transport: Any, moved: Callable[[], Mapping[str, int]] | None) -> Mapping[str, int]:
    """What went over the rings, and to a device."""
    return {**transport.counters(), **({} if moved is None else moved())}


def check_dispatch(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for a loader of a ``Dispatch`` that cannot do what the options say."""
    against = _against_dispatch(loader, options)
    if against is not None:
        raise ValueError(against[1])


def _against_dispatch(loader: Any, options: Options) -> tuple[tuple[str, ...], str] | None:
    """Options that do not go with a ``Dispatch``, and why; None where all do."""
    if not isinstance(loader.dataset, Dispatch):
        return None
    if options.worker_pool is not None:
        return ("worker_pool",), (
            f"worker_pool={options.worker_pool!r} and a Dispatch as dataset do not go together: its items "
            "come from a process of each iterator; leave worker_pool out, and say num_workers"
        )
    if options.restart_workers:
        return ("restart_workers",), (
            f"restart_workers={options.restart_workers} and a Dispatch as dataset do not go together: items "
            "that a worker had taken are lost with it; leave restart_workers out"
        )
    if options.worker_reset_fn is not None:
        return ("worker_reset_fn",), (
            f"worker_reset_fn={options.worker_reset_fn!r} and a Dispatch as dataset do not go together: "
            "workers have no dataset that an epoch could begin with; leave one of them out"
        )
    if options.on_error != RAISE:
        return _ON_ERROR, (
            f"on_error={options.on_error!r} and a Dispatch as dataset do not go together: its items are read "
            "in one process for all workers; catch errors in its functions, or leave on_error out"
        )
    return None


_ON_ERROR = ("on_error", "max_errors")


def check_retry(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for a loader whose samples cannot be asked for again."""
    against = _against_retry(loader, options)
    if against is not None:
        raise ValueError(against[1])


def _against_retry(loader: Any, options: Options) -> tuple[tuple[str, ...], str] | None:
    """As :func:`_against_dispatch`, for samples that are asked for again."""
    if loader._dataset_kind != internals.ITERABLE or retries(options.on_error) is None:
        return None
    return _ON_ERROR, (
        f"on_error={options.on_error!r} and an IterableDataset do not go together: its next sample would "
        "be another one; use 'skip', or a function of the index and the error"
    )


def check_threads(loader: Any) -> None:
    """Raises a ``ValueError`` for a loader that cannot have threads for workers, with what to change."""
    select_path.check_threads(loader)
    if loader.num_workers and isinstance(loader.dataset, Dispatch):
        raise ValueError(
            "worker_method='thread' and a Dispatch as dataset do not go together: its items go to worker "
            "processes; leave worker_method out, or pass the source itself with num_workers=1"
        )
