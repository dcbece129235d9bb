"""The table of options, in the order of the constructor's arguments, and the options of a loader.

Rows and rules lie with their features. Imports no torch. `make generate` writes signatures, docstrings and
pages from it and from each `texts.toml`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import ringloader.bad_samples as bad_samples
from ringloader._features import (
    auto,
    concurrency,
    device,
    joint,
    losses,
    main_prefetch,
    next_epoch,
    on_error,
    pools,
    rollover,
    rules,
    seeding,
    state,
    stats,
    threads,
)
from ringloader._features.device import DEVICE, DEVICE_PREFETCH, DEVICE_TRANSFORM
from ringloader._features.on_error import MAX_ERRORS, ON_ERROR
from ringloader._features.rules import About, Facts, Never, broken, checked_when, option, raise_first
from ringloader._features.seeding import SEED, SEEDING, WORKER_RESET_FN

if TYPE_CHECKING:
    import torch

    from ringloader._torch.protocols import TorchLoader
    from ringloader.seeds import Seeds


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, with all checks that need no torch.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """

    # The names of the options that have another value than their default. Each object has its own.
    changed: ClassVar[tuple[str, ...]] = ()

    max_shared_bytes: int | None = option(
        None,
        check=rules.integer(1, or_none=True),
        in_threads=Never("threads need no shared memory"),
        on_torchs="is left out",
    )
    device: torch.device | str | int | None = DEVICE
    device_prefetch: int = DEVICE_PREFETCH
    device_transform: Callable[[Any], Any] | None = DEVICE_TRANSFORM
    worker_pool: Any = pools.WORKER_POOL
    main_prefetch: int = main_prefetch.MAIN_PREFETCH
    worker_method: Literal["multiprocessing", "thread"] = threads.WORKER_METHOD
    worker_task: Literal["batch", "sample"] = joint.WORKER_TASK
    worker_concurrency: int = concurrency.WORKER_CONCURRENCY
    last_batch: Literal["keep", "discard", "rollover"] | None = rollover.LAST_BATCH
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = WORKER_RESET_FN
    seeding: Literal["torch", "epoch", "sample", "batch"] | None = SEEDING
    seed: int | None = SEED
    restart_workers: int = losses.RESTART_WORKERS
    on_error: bad_samples.OnError = ON_ERROR
    max_errors: int | None = MAX_ERRORS
    sample_timeout: float | None = losses.SAMPLE_TIMEOUT
    watchdog: float | None = losses.WATCHDOG
    stats: bool = stats.STATS
    snapshot_every_n_steps: int | None = state.SNAPSHOT_EVERY_N_STEPS
    num_workers: Literal["auto"] | None = auto.NUM_WORKERS
    prefetch_epochs: bool = next_epoch.PREFETCH_EPOCHS

    def __post_init__(self) -> None:
        values = vars(self)
        # No loop of Python's: most options have the very default.
        given = map(operator.is_not, values.values(), DEFAULTS.values())
        changed: tuple[str, ...] = ()
        for name in [*itertools.compress(values, given)]:
            about, value = TABLE[name], values[name]
            about.check(name, value)
            if value != DEFAULTS[name] and value not in about.as_default:
                changed += (name,)
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
_FEATURES = (
    auto,
    concurrency,
    device,
    joint,
    losses,
    main_prefetch,
    next_epoch,
    on_error,
    pools,
    rollover,
    seeding,
    state,
    stats,
    threads,
)
RULES = (*threads.rules_of(TABLE, DEFAULTS), *(rule for feature in _FEATURES for rule in feature.RULES))
_GIVEN = checked_when("given", RULES)
_BEGUN = checked_when("begun", RULES)


def check(loader: TorchLoader, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``, whose epoch begins."""
    raise_first(_BEGUN, options, options.changed, Facts(loader))


def without(options: Options, names: Iterable[str]) -> Options:
    """Returns ``options`` with some set to their defaults, and with them the options that need them."""
    values = {**{name: getattr(options, name) for name in TABLE}, **{name: DEFAULTS[name] for name in names}}
    while True:
        changed = [name for name, value in values.items() if value != DEFAULTS[name]]
        rule = next(broken(_GIVEN, types.SimpleNamespace(**values), changed), None)
        if rule is None:
            return Options(**values)
        values[rule.option] = DEFAULTS[rule.option]


# The attribute of a loader that has its options.
OPTIONS = "_ringloader_options"
# The attribute of our classes that names the options which attributes of their loaders show.
_SHOWN = "_ringloader_shown"
# All the defaults. Options do not change, so loaders share it.
NONE_GIVEN = Options()


def options_of(loader: object) -> Options:
    """Returns the options of ``loader``: all the defaults for one that has none."""
    found: Options = vars(loader).get(OPTIONS, NONE_GIVEN)
    return found


def values_of(loader: object) -> dict[str, Any]:
    """Returns the options of ``loader``, by their names."""
    options = options_of(loader)
    return {name: getattr(options, name) for name in TABLE}


def callables_of(loader: object) -> dict[str, Any]:
    """Returns the functions among the options of ``loader`` that its workers call, by their options."""
    called = {name: value for name, value in values_of(loader).items() if TABLE[name].is_called_in_workers}
    return {name: function for name, function in called.items() if callable(function)}


def has_options(loader: object) -> bool:
    """True for a loader that was made or converted with options."""
    return OPTIONS in vars(loader)


def takes_options(loader: object) -> bool:
    """True for a loader of our class, whose constructor takes options."""
    return hasattr(type(loader), _SHOWN)


def put_options(loader: object, options: Options) -> None:
    """Sets the options of ``loader``, and the attributes that show them.

    Only a constructor reads these attributes back: Lightning and accelerate make another loader of its
    ``__dict__``. A name that the program, or a subclass, uses for a thing of its own stays.
    """
    own, cls = vars(loader), type(loader)
    before, names = own.get(OPTIONS), getattr(cls, _SHOWN)
    taken = {name for name in own.keys() & set(names) if own[name] is not getattr(before, name, _MISSING)}
    for subclass in itertools.takewhile(lambda one: _SHOWN not in vars(one), cls.__mro__):
        taken |= vars(subclass).keys()
    values = vars(options)
    own.update({OPTIONS: options, **{name: values[name] for name in names if name not in taken}})


_MISSING = object()


class _Shown:
    """The attribute of one option. Its value lies in the loader's ``__dict__``, where frameworks read it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: object) -> Any:
        if loader is None or self._name not in vars(loader):
            # The error of a missing attribute: of the class, or of a loader that is not made yet.
            kind = owner if loader is None else type(loader)
            raise AttributeError(f"{kind!r} has no attribute {self._name!r}", name=self._name, obj=loader)
        return vars(loader)[self._name]

    def __set__(self, loader: object, value: Any) -> None:
        if vars(loader).get(self._name, _MISSING) is not value:
            self._check(loader)
        vars(loader)[self._name] = value

    def __delete__(self, loader: object) -> None:
        self.__get__(loader, type(loader))
        self._check(loader)
        del vars(loader)[self._name]

    def _check(self, loader: object) -> None:
        """Raises where the attribute shows the option. In a subclass the name is the subclass's."""
        own = vars(loader)
        option = getattr(own.get(OPTIONS), self._name, _MISSING)
        if own.get(self._name) is not option or _SHOWN not in vars(type(loader)):
            return
        instead = TABLE[self._name].instead
        change = (
            f"use ringloader.convert(loader, {self._name}=...)" if instead is None else "make a new loader"
        )
        raise AttributeError(
            f"{self._name} of a loader cannot be set: a loader reads its options when it is made; {change}",
            name=self._name,
            obj=loader,
        )


def show_options(cls: type, names: Iterable[str]) -> None:
    """Makes loaders of ``cls`` show these options in attributes of their names, which cannot be set."""
    # torch sets the attributes of its own arguments.
    shown = tuple(name for name in names if not TABLE[name].is_torchs)
    for name in shown:
        setattr(cls, name, _Shown(name))
    setattr(cls, _SHOWN, shown)
