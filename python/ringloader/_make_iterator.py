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
from ringloader._torch import internals, select_path


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
    forgotten_epoch.note(loader)
    if options.worker_method == THREAD and loader.num_workers > 0:
        check_threads(loader)
        why_not = select_path.reason_against_threads(without_ours)
        if why_not is not None:
            raise RuntimeError(f"worker_method='thread' cannot be had: {why_not}; leave worker_method out")
        return internals.get_iterator(
            without_ours, loader, functools.partial(_make_threads_iterator, options)
        )
    reason = select_path.reason_for_torch(loader, without_ours)
    if reason is None:
        return internals.get_iterator(without_ours, loader, functools.partial(_make_rings_iterator, options))
    if loader.num_workers > 0:
        _say_no_restarts(options)
    before = report.noted(loader)
    if options.device is None and options.worker_reset_fn is None and not options.reseed_workers:
        iterator, counters = fall_back(), None
        _put_steps(loader, iterator)
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
    made = make_iterator(loader, options, without_ours, fall_back)
    for text in aside:
        report.add(loader, text)
    return made


def _say_no_restarts(options: Options) -> None:
    if options.restart_workers:
        select_path.say_once("restart_workers has no effect where torch schedules")


def _make_torchs_iterator(
    loader: Any, options: Options, without_ours: Any, fall_back: Callable[[], Any]
) -> tuple[Any, Callable[[], Mapping[str, int]] | None]:
    """An iterator of torch's that does what the options say, and its counters."""
    from ringloader._main import stages, through

    passes = stages.stages_for(loader, options)
    moving = stages.moving_for(options)
    if internals.is_torchs_own(without_ours, "DataLoader._get_iterator"):
        begins = epochs.step_for(loader, options)
        view = functools.partial(through.view_for, moving=moving, begins=begins)
        made = internals.get_iterator_of_torch(without_ours, loader, view)
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
    if begins is not None and loader.num_workers == 0:
        epochs.begin_without_workers(made, loader, begins)
    _put_steps(loader, made)
    return through.through(made, moving, passes), None if moving is None else moving.counts


def _put_steps(loader: Any, iterator: Any) -> None:
    """Has an iterator without workers fetch as the loader's workers would."""
    if loader.num_workers == 0 and internals.missing_name() is None:
        from ringloader._main import stages

        stages.put_steps(iterator, stages.fetch_steps_for(loader))


def _make_rings_iterator(options: Options, loader: Any) -> Any:
    """Stands in for torch's iterator class."""
    from ringloader._main import iterator, restarting, stages, through, transport

    made: Any
    passes, moving = stages.stages_for(loader, options), stages.moving_for(options)
    steps = stages.steps_for(loader, options)
    moved_to = None if moving is None else moving.device_type
    lease = None
    if options.worker_pool is not None and pool.takes(options.worker_pool, loader):
        # Before the memory, which a process that is forked now would have too.
        lease = options.worker_pool._lend(loader)
        steps = (*epochs.telling_for(loader), *steps)
    # Before torch's constructor, which draws: after it there is no way back.
    try:
        made_transport = transport.make_transport(loader, options.max_shared_bytes, steps, moved_to, lease)
    except (OSError, ValueError) as error:
        if lease is not None:
            lease.close()
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            # torch's transport needs more of them, and leaves workers behind where its start fails.
            error.add_note(
                "Too few file descriptors are left: raise the limit (ulimit -n), or use fewer workers."
            )
            raise
        reason = f"shared memory could not be had: {error}"
        select_path.say_once(f"{reason}; batches travel by torch's own transport")
        made = internals.Iterator(through.view_for(loader, moving, epochs.step_in(steps)))
        made = through.through(made, moving, passes)
        report.record(loader, made, "torch", reason, dict if moving is None else moving.counts)
        return made
    counters = functools.partial(_counters, made_transport, None if moving is None else moving.counts)
    why_rings = select_path.reason_for_rings(loader)
    if why_rings is None:
        if moving is not None:
            moving.find_registrations = made_transport.registrations
        again = None
        if options.restart_workers:
            is_iterable = loader._dataset_kind == internals.ITERABLE
            again = restarting.Restarting(options.restart_workers, is_iterable, made_transport)
        made = iterator.RingIterator(loader, made_transport, passes, moving, options.main_prefetch, again)
        report.record(loader, made, "native", "native scheduling over shared-memory rings", counters)
    else:
        _say_no_restarts(options)
        made = iterator.TransportIterator(loader, made_transport, passes, moving)
        report.record(loader, made, "rings", why_rings, counters)
    return made


def _make_threads_iterator(options: Options, loader: Any) -> Any:
    """As :func:`_make_rings_iterator`, with threads for workers."""
    from ringloader._main import iterator as main_iterator
    from ringloader._main import stages
    from ringloader._threads import iterator, transport

    passes, moving = stages.stages_for(loader, options), stages.moving_for(options)
    made_transport = transport.make_transport(loader, stages.steps_for(loader, options))
    counters = functools.partial(_counters, made_transport, None if moving is None else moving.counts)
    why_torchs = select_path.reason_for_rings(loader)
    made: Any
    if why_torchs is None:
        made = iterator.ThreadIterator(loader, made_transport, passes, moving)
    else:
        made = main_iterator.TransportIterator(loader, made_transport, passes, moving)
    reason = why_torchs or "native scheduling, with threads for workers"
    report.record(loader, made, "threads", reason, counters)
    return made


def _counters(transport: Any, moved: Callable[[], Mapping[str, int]] | None) -> Mapping[str, int]:
    """What went over the rings, and to a device."""
    return {**transport.counters(), **({} if moved is None else moved())}


def check_dispatch(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for a loader of a ``Dispatch`` that cannot do what the options say."""
    if not isinstance(loader.dataset, Dispatch):
        return
    if options.worker_pool is not None:
        raise ValueError(
            f"worker_pool={options.worker_pool!r} and a Dispatch as dataset do not go together: its items "
            "come from a process of each iterator; leave worker_pool out, and say num_workers"
        )
    if options.restart_workers:
        raise ValueError(
            f"restart_workers={options.restart_workers} and a Dispatch as dataset do not go together: items "
            "that a worker had taken are lost with it; leave restart_workers out"
        )
    if options.worker_reset_fn is not None:
        raise ValueError(
            f"worker_reset_fn={options.worker_reset_fn!r} and a Dispatch as dataset do not go together: "
            "workers have no dataset that an epoch could begin with; leave one of them out"
        )


def check_threads(loader: Any) -> None:
    """Raises a ``ValueError`` for a loader that cannot have threads for workers, with what to change."""
    select_path.check_threads(loader)
    if loader.num_workers and isinstance(loader.dataset, Dispatch):
        raise ValueError(
            "worker_method='thread' and a Dispatch as dataset do not go together: its items go to worker "
            "processes; leave worker_method out, or pass the source itself with num_workers=1"
        )
