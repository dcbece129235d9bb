"""Makes the iterator of a loader, and notes the path that it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core import epochs, notes
from ringloader._core.feature import Feature, Hook, Options, Setup, first
from ringloader._torch import select_path
from ringloader._torch.select_path import Reason
from ringloader._worker.options import WorkerOption, in_order

if TYPE_CHECKING:
    from ringloader._common.protocols import PathName
    from ringloader._core.make_transport import WorkerKind
    from ringloader._torch.protocols import TorchLoader


def make_iterator(loader: TorchLoader, options: Options, hook: Hook) -> Any:
    """Returns an iterator of any torch loader, and notes the path that it takes.

    Args:
        loader: A ``torch.utils.data.DataLoader``.
        options: Its options.
        hook: The place where it is asked for.

    Raises:
        ValueError: If options do not go with the loader, or ``RINGLOADER`` has a value without a meaning.
        RuntimeError: If an option cannot take effect, because torch's loader must run whole.
    """
    made = _make(loader, options, hook)
    epochs.log_if_forgotten(loader)
    return made


def _make(loader: TorchLoader, options: Options, hook: Hook) -> Any:
    workers = loader.num_workers
    if options.changed:
        workers, options = hook.features.begun(loader, options)
    reason = select_path.reason_of_user()
    if reason is None and workers == 0:
        reason = select_path.reason_against_own_iterator(loader, hook.get_iterator)
        if reason is None:
            return _without_workers(loader, options, hook)
    elif reason is None and not _native.SUPPORTED:
        reason = select_path.reason_for_torch(loader, hook.get_iterator)
    elif reason is None:
        kind = hook.features.kind_of(loader, options)
        if kind is None:
            from ringloader._core.make_transport import WorkerKind

            kind = WorkerKind()
        reason = kind.reason_for_torch(loader, hook.get_iterator)
        if reason is None:
            with kind.while_made():
                made = _with_workers(loader, options, workers, kind, hook)
            if not isinstance(made, Reason):
                return made
            reason = made
        kind.refuse(reason)
    assert reason is not None
    return _torchs(loader, options, reason, hook)


def needed_by(dataset: object) -> str | None:
    """Returns the name of the feature that a dataset of ours needs with workers; None for other datasets."""
    needed: str | None = getattr(type(dataset), "_ringloader_needs", None)
    return needed


def _features_of(
    loader: TorchLoader, options: Options, hook: Hook, path: str, *more: Any
) -> tuple[Feature, ...]:
    """Returns the features of an iterator of this path that are on."""
    setup = Setup(path, *more)
    found: tuple[Feature, ...] = ()
    listed, dataset = hook.features, loader.dataset
    is_asked = options.changed or loader.timeout or listed.at_exit.mode
    if is_asked or needed_by(dataset) is not None or type(dataset) in listed.fetchers:
        found = listed.features_of(loader, options, setup)
    return (*found, *(make(loader, options, setup) for make in hook.always))


def _torchs(loader: TorchLoader, options: Options, reason: Reason, hook: Hook) -> Any:
    """Returns torch's own iterator, with the options that work there."""
    from ringloader._core.torchs import TorchsIterator

    before = notes.of(loader)
    left_out = hook.features.without_effect(loader, options, reason.text)
    features = _features_of(loader, options, hook, "torch", loader.num_workers)
    iterator = first(feature.torchs(loader, reason.text, hook.get_iterator) for feature in features)
    if iterator is None:
        iterator = hook.fall_back()
    if notes.of(loader) is not before:
        # An inner hook has noted this iterator.
        return iterator
    if reason.warning is not None:
        select_path.log_once(reason.warning)
    for name in left_out:
        select_path.log_once(f"{name} has no effect where torch's own loader runs")
    if features:
        iterator = TorchsIterator(iterator, features)
        for feature in features:
            feature.begun(loader, iterator)
    _note(loader, iterator, "torch", reason.text, features)
    return iterator


def _without_workers(loader: TorchLoader, options: Options, hook: Hook) -> Any:
    # A torch without a private name that it needs has torch's path. In this form an import is cheap.
    import ringloader._core.without_workers as without_workers

    listed = hook.features
    if not options.changed and not listed.at_exit.mode and not hook.always:
        wrap = listed.fetchers.get(type(loader.dataset))
        made = without_workers.SingleProcessIterator(loader, wrap)
        notes.note(loader, made, "single-process", _NO_WORKERS)
        return made
    features = _features_of(loader, options, hook, "single-process")
    made = without_workers.IteratorWithOptions(loader, _worker_options_of(features), features)
    _note(loader, made, "single-process", _NO_WORKERS, features)
    return made


_NO_WORKERS = "num_workers is 0"


def _worker_options_of(features: Iterable[Feature]) -> Sequence[WorkerOption]:
    """Returns the options that take part where batches are made: in workers, or without them here."""
    found = (option for feature in features for option in feature.workers())
    return in_order(*found)


def _with_workers(loader: TorchLoader, options: Options, workers: int, kind: WorkerKind, hook: Hook) -> Any:
    """Returns an iterator with workers, or the reason why torch's loader must run whole."""
    features = _features_of(loader, options, hook, kind.path, workers, workers)
    setup = Setup(kind.path, workers, workers)
    for feature in features:
        setup = feature.setup(setup)
    from ringloader._core.with_workers import WorkersIterator
    from ringloader._transport import budget

    worker_options = _worker_options_of(features)
    transport = None
    try:
        told = kind.told(loader)
        transport = kind.transport(loader, options, setup, worker_options, features)
        for feature in features:
            feature.attach(transport)
        if setup.history is None and kind.are_here:
            loader.check_worker_number_rationality()
        made = WorkersIterator(loader, transport, features, setup.workers, setup.running, told)
    except BaseException as error:
        if transport is not None:
            # An iterator that was begun has closed it.
            transport.close()
        if isinstance(error, budget.RefusedError):
            return Reason(str(error), f"{error}; batches travel by torch's own transport")
        if budget.is_for_descriptors(error):
            error.add_note(
                "Too few file descriptors are left: raise the limit (ulimit -n), or use fewer workers."
            )
        raise
    _note(loader, made, transport.path, transport.about, features, transport.counters)
    return made


def _note(
    loader: TorchLoader,
    made: Any,
    path: PathName,
    reason: str,
    features: Iterable[Feature],
    of_transport: Callable[[], Mapping[str, int]] = dict,
) -> None:
    counts = [of_transport, *(feature.counters for feature in features if feature.counters is not None)]
    note = notes.note(loader, made, path, reason, functools.partial(_counters, counts))
    for feature in features:
        feature.noted(note)


def _counters(counts: Iterable[Callable[[], Mapping[str, int]]]) -> Mapping[str, int]:
    return {name: number for count in counts for name, number in count().items()}
