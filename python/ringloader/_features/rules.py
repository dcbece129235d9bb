"""Rows and rules of options: the columns of the table, checks of values, and what an option does not go with.

Each feature has its own rows and rules, and `table.py` the list of all. The constructor, ``convert``,
``install`` and the environment know no other. Imports no torch, until a rule asks for ``Facts`` of a loader.

A check is called with the option's name and its value. It raises ``TypeError`` for a wrong type, and
``ValueError`` for a value that is out of range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

Topic = Literal["Speed", "Order and randomness", "Errors", "Memory", "Devices", "Watching", "Resume"]
# In the order of the page of options.
TOPICS: tuple[Topic, ...] = get_args(Topic)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of an option, in Markdown.

    Attributes:
        topic: The heading of the page of options under which it stands.
        values: The values that it takes.
        without: The default, and what it means.
        line: One sentence: what it does.
        details: Another sentence for the page of options.
        example: Lines of Python for the page of options, which has ``DataLoader`` and ``dataset``.
        page: The page, and its section, that has the rest.
    """

    topic: Topic
    values: str
    without: str
    line: str
    details: str = ""
    example: str = ""
    page: str | None = None


def texts(names: Iterable[str]) -> dict[str, Texts]:
    """Returns the texts of options, for help and pages, in the order of their names.

    Raises:
        KeyError: If one has no texts.
    """
    import tomllib

    files = Path(__file__).parent.rglob("texts.toml")
    found = {name: one for file in files for name, one in tomllib.loads(file.read_text("utf-8")).items()}
    return {name: Texts(**found[name]) for name in names}


@dataclasses.dataclass(frozen=True)
class Never:
    """Says that an option raises there.

    Attributes:
        why: The reason, for the error.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class About:
    """The row of an option. Its texts stand in ``texts.toml`` of the same folder.

    Attributes:
        check: Raises for a value of the wrong type or out of range; is called with the name and the value.
        on_torchs: What happens to the option where torch's own loader runs whole.
        in_threads: What happens to it where workers are threads.
        in_worker: What happens to the option of a loader that a dataset has, in a worker process.
        off_linux: What happens to it on other systems, if not what ``in_threads`` and the like say: without
            workers it works there, and with workers torch's own loader runs.
        annotation: Its type in signatures, where the table cannot name it without torch.
        instead: For an option of the constructor only, what to do where there is no constructor.
        is_text: False for an option that no text can give.
        is_called_in_workers: True for a function that workers call: the processes of a pool hold it.
        is_of_states: True for an option that only ``StatefulDataLoader`` has.
        is_torchs: True for an argument of torch's, which takes the option's values too.
        as_default: Values that mean what the default means, where no rule says otherwise.
    """

    check: Check
    on_torchs: Literal["works", "is an error", "is an error with workers", "is left out"]
    in_threads: Literal["works"] | Never = "works"
    in_worker: Literal["works", "is left out", "is left out by install"] = "works"
    off_linux: Literal["is left out", "is an error with workers"] | None = None
    annotation: str | None = None
    instead: str | None = None
    is_text: bool = True
    is_called_in_workers: bool = False
    is_of_states: bool = False
    is_torchs: bool = False
    as_default: tuple[object, ...] = ()


def option(default: Any, **about: Any) -> Any:
    """Returns the field of an option, with its default and its row."""
    return dataclasses.field(default=default, metadata={"about": About(**about)})


# The value of `worker_method` for threads, in torch's word.
THREAD = "thread"
# The value of `num_workers` for a loader that finds its number.
AUTO: Literal["auto"] = "auto"

Check = Callable[[str, Any], None]

# Native code counts in 64 bits, and Python's lengths have a sign.
_END = 1 << 63


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(lowest: int, or_none: bool = False) -> Check:
    """Returns the check of an int that is at least ``lowest``: 0 or 1."""
    kind = "an int or None" if or_none else "an int"
    least = "positive" if lowest else "0 or more"

    def check(name: str, value: Any) -> None:
        if value is None and or_none:
            return
        if not is_int(value):
            raise TypeError(f"{name} must be {kind}, not {value!r}")
        if value < lowest:
            raise ValueError(f"{name} must be {least}, not {value}")
        if value >= _END:
            raise ValueError(f"{name} must be less than {_END}, not {value}")

    return check


def one_of(*words: str, or_none: bool = False) -> Check:
    """Returns the check of a word."""

    def check(name: str, value: Any) -> None:
        if value is None and or_none:
            return
        if not isinstance(value, str) or value not in words:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} must be one of {words}, not {value!r}")

    return check


def callable_or_none(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(f"{name} must be a callable or None, not {value!r}: pass the function itself")
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a callable or None, not {value!r}")


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")


def seconds_or_none(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, float) and not is_int(value):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value}: leave it out to have none")


Seeds = Literal["torch", "epoch", "sample", "batch"]
# When a rule is checked: where options are given, whatever the loader; when a loader is made or converted;
# then, and again when an epoch begins.
When = Literal["given", "made", "begun"]


class Facts:
    """The properties of a loader that rules ask for. Each is looked up when a rule asks for it.

    Args:
        loader: The loader itself, for the attributes that torch documents.
    """

    def __init__(self, loader: TorchLoader) -> None:
        self.loader = loader

    @property
    def start_method(self) -> Any:
        """The name of its ``multiprocessing_context``, or the context if it has none; None without."""
        context = self.loader.multiprocessing_context
        return getattr(context, "_name", context)

    @property
    def is_iterable(self) -> bool:
        """True for an ``IterableDataset``."""
        import ringloader._torch.internals as internals

        return bool(self.loader._dataset_kind == internals.ITERABLE)

    @property
    def is_data_pipe(self) -> bool:
        """True for a DataPipe."""
        import ringloader._torch.internals as internals

        return issubclass(type(self.loader.dataset), internals.DATA_PIPES)

    @property
    def is_dispatch(self) -> bool:
        """True for a ``Dispatch``."""
        from ringloader._core.make import needed_by

        return needed_by(self.loader.dataset) == "Dispatch"

    @property
    def is_asked_for_states(self) -> bool:
        """True if its dataset has, or may have, a part in the loader's state."""
        from ringloader._core.feature import asks_dataset

        return asks_dataset(self.loader)

    @property
    def has_set_epoch(self) -> bool:
        """True if its dataset, or one inside, has a ``set_epoch``."""
        from ringloader._worker.options import epoch_listeners

        return bool(epoch_listeners(self.loader.dataset))

    @property
    def last_batch(self) -> str | None:
        """Returns the value of ``last_batch`` that describes its batch sampler; None: unknown."""
        from torch.utils.data import BatchSampler

        sampler = self.loader.batch_sampler
        does: str | None = getattr(sampler, "last_batch", None)
        if does is None and isinstance(sampler, BatchSampler):
            return "discard" if sampler.drop_last else "keep"
        return does


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


def with_streams_and_states(
    option: str, why_stream: str, why_state: str, value: str | None = None
) -> tuple[Conflict, Conflict]:
    """Returns the rules of an option that begins samples by their indices, before their turn.

    Args:
        option: The option.
        why_stream: The reason against an iterable dataset.
        why_state: The reason against a dataset with a state.
        value: The value that the option must have for it, for the pages.
    """
    return (
        of_loader(
            option,
            "with an `IterableDataset`",
            lambda _, facts: facts.is_iterable,
            "an IterableDataset",
            f"{why_stream}; leave {option} out",
            value,
        ),
        of_loader(
            option,
            "with a dataset that has a `state_dict`",
            lambda options, facts: options.snapshot_every_n_steps is not None and facts.is_asked_for_states,
            "a dataset with a state_dict",
            f"{why_state}; leave {option} out, or pass snapshot_every_n_steps=None",
            value,
        ),
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
