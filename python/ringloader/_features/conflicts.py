"""Checks of the options for a loader, against the rules, and which options ``install`` leaves aside."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

import ringloader._native as _native
from ringloader._core.feature import asks_dataset
from ringloader._core.make import needed_by
from ringloader._features.rules import THREAD, About, broken, checked_when, raise_first
from ringloader._features.table import DEFAULTS, RULES, TABLE, Options
from ringloader._torch import internals, select_path
from ringloader._worker.options import epoch_listeners

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_GIVEN = checked_when("given", RULES)
_MADE = checked_when("made", RULES)
_BEGUN = checked_when("begun", RULES)
_LEFT_ASIDE = tuple(rule for rule in RULES if rule.is_left_aside)


class _Facts:
    """The facts of a loader. Each is looked up when a rule asks for it."""

    def __init__(self, loader: TorchLoader) -> None:
        self.loader = loader

    @property
    def start_method(self) -> Any:
        context = self.loader.multiprocessing_context
        return getattr(context, "_name", context)

    @property
    def is_iterable(self) -> bool:
        return bool(self.loader._dataset_kind == internals.ITERABLE)

    @property
    def is_data_pipe(self) -> bool:
        return issubclass(type(self.loader.dataset), internals.DATA_PIPES)

    @property
    def is_dispatch(self) -> bool:
        return needed_by(self.loader.dataset) == "Dispatch"

    @property
    def is_asked_for_states(self) -> bool:
        return asks_dataset(self.loader)

    @property
    def has_set_epoch(self) -> bool:
        return bool(epoch_listeners(self.loader.dataset))

    @property
    def last_batch(self) -> str | None:
        sampler = self.loader.batch_sampler
        does: str | None = getattr(sampler, "last_batch", None)
        if does is None and isinstance(sampler, BatchSampler):
            return "discard" if sampler.drop_last else "keep"
        return does


def check(loader: TorchLoader, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``, whose epoch begins."""
    raise_first(_BEGUN, options, options.changed, _Facts(loader))


def check_made(loader: TorchLoader, options: Options, names: Collection[str] = TABLE) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``, which is made or converted.

    Args:
        loader: The loader, with the attributes that torch's constructor has set.
        options: Its options.
        names: Those that are new. Others are checked only as when an epoch begins.
    """
    if options.changed:
        check(loader, options)
        changed = [name for name in options.changed if name in names]
        raise_first(_MADE, options, changed, _Facts(loader))
    if not _native.SUPPORTED:
        _check_off_linux(loader, options)


def begun(loader: TorchLoader, options: Options) -> Options:
    """Returns the options of a loader whose epoch begins, and leaves out options without effect here.

    Raises:
        ValueError: If options do not go with the loader.
    """
    if internals.is_in_worker():
        # This loader leaves its batches on the CPU, and the main process moves them.
        options = in_worker(options)
    if not _native.SUPPORTED:
        options = off_linux(options)
    check(loader, options)
    return options


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
    facts = _Facts(loader)
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


def off_linux(options: Options) -> Options:
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


def without(options: Options, names: Iterable[str]) -> Options:
    """Returns ``options`` with some set to their defaults, and with them the options that need them."""
    values = {**{name: getattr(options, name) for name in TABLE}, **{name: DEFAULTS[name] for name in names}}
    while True:
        changed = [name for name, value in values.items() if value != DEFAULTS[name]]
        rule = next(broken(_GIVEN, types.SimpleNamespace(**values), changed), None)
        if rule is None:
            return Options(**values)
        values[rule.option] = DEFAULTS[rule.option]
