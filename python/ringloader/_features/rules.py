"""Rules: what an option does not go with, when that is checked, and the error.

Each feature has its own rules, and `table.py` the list of all. The constructor, ``convert``, ``install`` and
the environment know no other. Imports no torch: a rule asks for ``Facts`` of a loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ringloader._features.checks import AUTO

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

Seeds = Literal["torch", "epoch", "sample", "batch"]
# When a rule is checked: where options are given, whatever the loader; when a loader is made or converted;
# then, and again when an epoch begins.
When = Literal["given", "made", "begun"]


class Facts(Protocol):
    """The properties of a loader that rules ask for, in addition to its attributes."""

    # The loader itself, for the attributes that torch documents.
    loader: TorchLoader

    @property
    def start_method(self) -> Any:
        """The name of its ``multiprocessing_context``, or the context if it has none; None without."""

    @property
    def is_iterable(self) -> bool:
        """True for an ``IterableDataset``."""

    @property
    def is_data_pipe(self) -> bool:
        """True for a DataPipe."""

    @property
    def is_dispatch(self) -> bool:
        """True for a ``Dispatch``."""

    @property
    def is_asked_for_states(self) -> bool:
        """True if its dataset has, or may have, a part in the loader's state."""

    @property
    def has_set_epoch(self) -> bool:
        """True if its dataset, or one inside, has a ``set_epoch``."""

    @property
    def last_batch(self) -> str | None:
        """Returns the value of ``last_batch`` that describes its batch sampler; None: unknown."""


@dataclasses.dataclass(frozen=True)
class Conflict:
    """One thing that an option does not go with.

    Attributes:
        option: The option. Its default goes with everything.
        what: What it does not go with, for the pages, from "with", "without" or "other than" on.
        when: When the rule is checked.
        is_broken: Called with the options and the facts of a loader. The facts are None for a rule that is
            checked where options are given.
        text: The error, as a format of ``options`` and ``facts``.
        is_left_aside: True if ``install``, whose options are for loaders of all kinds, leaves the option
            aside for such a loader.
        value: The value that the option must have for it, for the pages; None: any but the default.
    """

    option: str
    what: str
    when: When
    is_broken: Callable[[Any, Any], object]
    text: str
    is_left_aside: bool = False
    value: str | None = None


def of_options(
    option: str, what: str, is_broken: Callable[[Any], object], text: str, value: str | None = None
) -> Conflict:
    return Conflict(option, what, "given", lambda options, _: is_broken(options), text, value=value)


def of_loader(
    option: str,
    what: str,
    is_broken: Callable[[Any, Facts], object],
    with_: str,
    why: str,
    value: str | None = None,
) -> Conflict:
    """Returns a rule that is checked when epochs begin too, and for which ``install`` leaves options aside.

    Args:
        option: The option.
        what: What it does not go with, for the pages.
        is_broken: Called with the options and the facts of a loader.
        with_: The same for the error, with its value.
        why: The reason, and what to change.
        value: The value that the option must have for it, for the pages.
    """
    text = f"{option}={{options.{option}!r}} and {with_} do not go together: {why}"
    return Conflict(option, what, "begun", is_broken, text, is_left_aside=True, value=value)


def checked_when(when: When, rules: Iterable[Conflict]) -> tuple[Conflict, ...]:
    """Returns the rules that are checked first at that time."""
    return tuple(rule for rule in rules if rule.when == when)


def broken(
    rules: Iterable[Conflict], options: Any, changed: Collection[str], facts: Facts | None = None
) -> Iterator[Conflict]:
    """Yields the rules that are broken.

    Args:
        rules: The rules.
        options: The options, as attributes.
        changed: Options that have another value than their default.
        facts: The facts of the loader; None if no rule asks for one.
    """
    for rule in rules:
        if rule.option in changed and rule.is_broken(options, facts):
            yield rule


def raise_first(
    rules: Iterable[Conflict], options: Any, changed: Collection[str], facts: Facts | None = None
) -> None:
    """Raises a ``ValueError`` for the first rule that is broken. Takes the arguments of :func:`broken`."""
    for rule in broken(rules, options, changed, facts):
        raise ValueError(rule.text.format(options=options, facts=facts))


def with_dispatch(option: str, why: str) -> Conflict:
    return of_loader(
        option, "with a `Dispatch`", lambda _, facts: facts.is_dispatch, "a Dispatch as dataset", why
    )


def seeds_of(options: Any) -> Seeds:
    """Returns ``seeding``, or what it is by default."""
    by_default: Seeds = "sample" if options.worker_task == "sample" or is_auto(options) else "torch"
    return options.seeding or by_default


def is_auto(options: Any) -> bool:
    return bool(options.num_workers == AUTO)


def shares(options: Any) -> bool:
    return bool(options.worker_task == "sample")


def is_without_workers(options: Any, facts: Facts) -> object:
    # With a pool, a loader that says no number has as many workers as the pool.
    return facts.loader.num_workers == 0 and options.worker_pool is None and not is_auto(options)


def has_remote_pool(options: Any) -> object:
    return options.worker_pool is not None and options.worker_pool._is_remote
