"""Makes a loader of the arguments of its constructor, and changes one that is converted, as options say."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

import ringloader._features.all as features
import ringloader._native as _native
from ringloader._features import conflicts, loader_options
from ringloader._features.auto import auto_of
from ringloader._features.dispatch import datapipes
from ringloader._features.table import DEFAULTS, TABLE, Options
from ringloader._torch import devices, internals, select_path

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

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
    options = Options(**ours) if ours else loader_options.NONE_GIVEN
    if options.device is not None and not internals.is_in_worker():
        devices.resolve(options.device)
    if options.changed:
        torchs |= arguments_for(loader, options, options.changed, workers)
    dataset = arguments["dataset"]
    # Not `isinstance`, which takes longer.
    if IterableDataset in type(dataset).__mro__:
        dataset = datapipes.translated(dataset, torchs)
    init(dataset, **torchs)
    if options.changed or not _native.SUPPORTED:
        conflicts.check_made(loader, options)
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
    for module in features.modules_of(features.ARGUMENTS, names):
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
        for module in features.modules_of(features.COMPLETED, names):
            module.complete(loader, options, has_default_prefetch)
    loader_options.put(loader, options)
    if loader.num_workers > 0 and _native.SUPPORTED and not select_path.is_off():
        if options.changed and any(not names.isdisjoint(options.changed) for _, names in features.KINDS):
            # The loader starts no processes itself.
            return
        # In this form an import is cheap.
        import ringloader._start.spawn as spawn

        spawn.prepare(loader)
