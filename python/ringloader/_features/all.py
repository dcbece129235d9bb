"""The features of the loader, in their order, and what turns each on: a ``FeatureList``.

Makes a loader of the arguments of its constructor, and changes one that is converted, as their options say.
Compares a loader with the rules, and leaves options out where they have no effect.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from multiprocessing import get_start_method
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import IterableDataset, TensorDataset

import ringloader._native as _native
from ringloader._core.feature import Feature, Setup
from ringloader._core.make import needed_by
from ringloader._data.array_dataset import ArrayDataset
from ringloader._features.auto import auto_of
from ringloader._features.devices import resolve
from ringloader._features.dispatch import datapipes
from ringloader._features.report import at_exit as at_exit
from ringloader._features.report import report
from ringloader._features.rules import THREAD, About, Facts, broken, checked_when, raise_first
from ringloader._features.table import (
    DEFAULTS,
    NONE_GIVEN,
    RULES,
    TABLE,
    Options,
    check,
    put_options,
    without,
)
from ringloader._torch import internals, select_path

if TYPE_CHECKING:
    from ringloader._core.make_transport import WorkerKind
    from ringloader._torch.protocols import TorchLoader


def _gathering(fetcher: Any) -> Any:
    # In this form an import is cheap.
    import ringloader._features.arrays as arrays

    return arrays.wrapped(fetcher)


# Classes of datasets whose batches are rows of arrays.
fetchers = dict.fromkeys((numpy.ndarray, numpy.memmap, torch.Tensor, TensorDataset, ArrayDataset), _gathering)

# The module of each, whose `feature_for` makes it, and the names for which it is looked up: options, the
# class of a dataset of ours, datasets of rows, and torch's `timeout`.
FEATURES = (
    ("ringloader._features.auto.auto_workers", {"num_workers"}),
    ("ringloader._features.concurrency.making", {"worker_concurrency"}),
    # An epoch's start is the time in which the features after this one are imported and made.
    ("ringloader._features.stats.recording", {"stats"}),
    ("ringloader._features.arrays", {"rows"}),
    ("ringloader._features.device.feature", {"device"}),
    ("ringloader._features.main_prefetch.decoding", {"main_prefetch"}),
    ("ringloader._features.on_error.handling", {"on_error"}),
    ("ringloader._features.seeding.epochs", {"worker_reset_fn", "seeding"}),
    ("ringloader._features.seeding.seeding", {"seeding", "worker_task", "num_workers"}),
    ("ringloader._features.next_epoch.next_epoch", {"prefetch_epochs"}),
)
# The features that take part with workers only, after the others. Other systems lack what they need.
OF_WORKERS = (
    ("ringloader._features.joint.worker_task", {"worker_task"}),
    ("ringloader._features.dispatch.process", {"Dispatch"}),
    ("ringloader._features.losses.watchdog", {"watchdog", "timeout"}),
    ("ringloader._features.losses.restarting", {"restart_workers", "sample_timeout"}),
)

# The modules of kinds of workers, whose `kind_for` gives one, and the options, or the start method, for which
# each is asked.
KINDS = (
    ("ringloader._features.threads.transport", {"worker_method"}),
    ("ringloader._features.pools.pool", {"worker_pool"}),
    ("ringloader._features.spawn_server", {"spawn"}),
)


# The modules of options that decide arguments of torch's, by `arguments_for`: of two, the later one wins.
ARGUMENTS = (
    ("ringloader._features.pools.pool", {"worker_pool"}),
    ("ringloader._features.auto.auto_workers", {"num_workers", "worker_pool"}),
)
# The modules of options that change a loader which torch's constructor has made, by `complete`.
COMPLETED = (
    ("ringloader._features.joint.worker_task", {"worker_task"}),
    ("ringloader._features.rollover", {"last_batch"}),
)


def modules_of(rows: Iterable[tuple[str, set[str]]], names: Collection[str | None]) -> Iterator[Any]:
    """Returns the modules of rows that have one of these names."""
    return (importlib.import_module(module) for module, of in rows if not of.isdisjoint(names))


def kind_of(loader: TorchLoader, options: Options) -> WorkerKind | None:
    """Returns the kind of workers that an option gives a loader, or a start method; None: the core's own."""
    names = *options.changed, _start_method_of(loader)
    kinds = (module.kind_for(loader, options) for module in modules_of(KINDS, names))
    return next((kind for kind in kinds if kind is not None), None)


def _start_method_of(loader: TorchLoader) -> str | None:
    """Returns the name of a loader's start method; None if it has none, or nothing has chosen one yet."""
    context: Any = loader.multiprocessing_context
    return get_start_method(allow_none=True) if context is None else getattr(context, "_name", None)


def begun(loader: TorchLoader, options: Options) -> tuple[int, Options]:
    """Returns the number of workers of an iterator, or the bound of one to find, and its options.

    Raises:
        ValueError: If options do not go with the loader.
    """
    workers = loader.num_workers
    if options.num_workers is not None:
        from ringloader._features.auto import auto_workers

        workers = auto_workers.bound_for(loader, options)
    if internals.is_in_worker():
        # This loader leaves its batches on the CPU, and the main process moves them.
        options = in_worker(options)
    if not _native.SUPPORTED:
        options = _off_linux(options)
    check(loader, options)
    return workers, options


def features_of(loader: TorchLoader, options: Options, setup: Setup) -> tuple[Feature, ...]:
    """Returns the features of an iterator that are on, in their order.

    Args:
        loader: The iterator's loader.
        options: Its options. Where torch's own loader runs, some have no effect.
        setup: The way in which the iterator makes its batches.
    """
    found: list[Feature] = [report.Clock(loader)] if at_exit.mode else []
    on: set[str | None] = set()
    on |= {name for name in options.changed if setup.path != "torch" or TABLE[name].on_torchs == "works"}
    if setup.path != "torch" and type(loader.dataset) in fetchers:
        on.add("rows")
    if setup.path != "torch" and setup.workers:
        on |= {needed_by(loader.dataset), "timeout" if loader.timeout else None}
    for module in modules_of(FEATURES + OF_WORKERS if setup.workers else FEATURES, on):
        feature = module.feature_for(loader, options, setup)
        if feature is not None:
            found.append(feature)
            setup = feature.setup(setup)
    return tuple(found)


_MADE = checked_when("made", RULES)
_LEFT_ASIDE = tuple(rule for rule in RULES if rule.is_left_aside)
_OURS = {name: value for name, value in DEFAULTS.items() if not TABLE[name].is_torchs}


def _given_of(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that were given and are not the very default. No code of a value's class runs."""
    # No loop of Python's: each constructor asks.
    found = map(values.get, defaults, defaults.values())
    given = map(operator.is_not, found, defaults.values())
    return {name: values[name] for name in itertools.compress(defaults, given)}


def construct(
    loader: TorchLoader,
    init: Callable[..., None],
    defaults: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> None:
    """Makes a loader.

    Args:
        loader: The loader.
        init: Torch's constructor, or that of the next class of the MRO.
        defaults: The arguments of torch's after the dataset, with their defaults.
        arguments: The arguments of our constructor, by their names.
    """
    # Only values that are not the default: the next class of the MRO may have its own.
    torchs, ours = _given_of(arguments, defaults), _given_of(arguments, _OURS)
    workers = arguments["num_workers"]
    if type(workers) is not int and (given := auto_of(workers)) is not None:
        ours["num_workers"] = given
    options = Options(**ours) if ours else NONE_GIVEN
    if options.device is not None and not internals.is_in_worker():
        resolve(options.device)
    if options.changed:
        torchs |= arguments_for(loader, options, options.changed, workers)
    dataset = arguments["dataset"]
    # Not `isinstance`, which takes longer.
    if IterableDataset in type(dataset).__mro__:
        dataset = datapipes.translated(dataset, torchs)
    init(dataset, **torchs)
    if options.changed or not _native.SUPPORTED:
        check_made(loader, options)
    complete(loader, options, options.changed, arguments["prefetch_factor"] is None)


def arguments_for(
    loader: TorchLoader, options: Options, names: Collection[str], workers: int
) -> dict[str, Any]:
    """Returns the arguments of torch's that options decide.

    Args:
        loader: The loader, which is being made or converted.
        options: Its options.
        names: The options that are new.
        workers: Its ``num_workers``.
    """
    found: dict[str, Any] = {}
    for module in modules_of(ARGUMENTS, names):
        found |= module.arguments_for(loader, options, workers)
    return found


def complete(
    loader: TorchLoader, options: Options, names: Collection[str], has_default_prefetch: bool
) -> None:
    """Puts options on a loader that goes with them, and changes it as they say.

    Args:
        loader: The loader.
        options: Its options.
        names: The options that are new.
        has_default_prefetch: True if its ``prefetch_factor`` was not given.
    """
    if names:
        for module in modules_of(COMPLETED, names):
            module.complete(loader, options, has_default_prefetch)
    put_options(loader, options)
    if loader.num_workers > 0 and _native.SUPPORTED and not select_path.is_off():
        has_others = any(not names.isdisjoint(options.changed) for _, names in KINDS)
        if _start_method_of(loader) == "spawn" and not has_others:
            from ringloader._features import spawn_server

            spawn_server.prepare(loader)


def check_made(loader: TorchLoader, options: Options, names: Collection[str] | None = None) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``, which is made or converted.

    Args:
        loader: The loader, with the attributes that torch's constructor has set.
        options: Its options.
        names: Those that are new; None: all. Others are checked only as when an epoch begins.
    """
    if options.changed:
        check(loader, options)
        new = options.changed if names is None else [name for name in options.changed if name in names]
        raise_first(_MADE, options, new, Facts(loader))
    if not _native.SUPPORTED:
        _check_off_linux(loader, options)


def without_effect(loader: TorchLoader, options: Options, reason: str) -> list[str]:
    """Returns the options that have no effect where torch's own loader runs.

    Raises:
        RuntimeError: For options without which it would give other batches.
    """
    errors = {"is an error"} if loader.num_workers == 0 else {"is an error", "is an error with workers"}
    names = [name for name in options.changed if TABLE[name].on_torchs in errors]
    if loader.num_workers > 0 and (needed := needed_by(loader.dataset)) is not None:
        names.append(f"a {needed} as dataset")
    if names:
        raise RuntimeError(
            f"{' and '.join(names)} cannot take effect where torch's own loader runs: {reason}"
        )
    if loader.num_workers == 0:
        return []
    return [name for name in options.changed if TABLE[name].on_torchs == "is left out"]


def fitting(loader: TorchLoader, options: Options) -> tuple[Options, list[str]]:
    """Leaves aside options that do not go with ``loader``.

    Returns:
        The other options, and the texts of the conflicts.
    """
    texts = []
    facts = Facts(loader)
    while (rule := next(broken(_LEFT_ASIDE, options, options.changed, facts), None)) is not None:
        text = rule.text.format(options=options, facts=facts)
        texts.append(text)
        options = without(options, [rule.option])
        if rule.option == "worker_method":
            select_path.log_once(f"install(worker_method={THREAD!r}) leaves a loader its processes: {text}")
    return options, texts


def _check_off_linux(loader: TorchLoader, options: Options) -> None:
    """Raises a ``ValueError`` for options without which torch's workers would give other batches."""
    if loader.num_workers == 0 or internals.is_in_worker():
        return
    names = [name for name in options.changed if _is_error_off_linux(TABLE[name])]
    if (needed := needed_by(loader.dataset)) is not None:
        names.append(f"a {needed} as dataset")
    if names:
        raise ValueError(
            f"{' and '.join(names)} cannot be used with num_workers={loader.num_workers} on this system: "
            f"{select_path.NEEDS_LINUX}; leave it out here, or pass num_workers=0"
        )


def _is_error_off_linux(about: About) -> bool:
    fate = about.off_linux or about.on_torchs
    return fate in ("is an error", "is an error with workers")


def _off_linux(options: Options) -> Options:
    """Returns the options that can have an effect on other systems than Linux. The log names the others."""
    names = [name for name in options.changed if TABLE[name].off_linux == "is left out"]
    for name in names:
        select_path.log_once(f"{name} has no effect on this system: it needs Linux")
    return without(options, names) if names else options


def in_worker(options: Options, is_installed: bool = False) -> Options:
    """Returns the options of a loader in a worker process.

    Args:
        options: The options that it was given.
        is_installed: True if ``install`` has given them, for loaders of the main process.
    """
    aside = {"is left out", "is left out by install"} if is_installed else {"is left out"}
    names = [name for name in options.changed if TABLE[name].in_worker in aside]
    return without(options, names) if names else options
