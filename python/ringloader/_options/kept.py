"""The options of a loader: the attribute that has them, and those that show them and cannot be set."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from ringloader._common import states
from ringloader._common.looking import has
from ringloader._options.table import DEFAULTS, TABLE, Options

# The attribute of a loader that has its options. Frameworks read others, which show them.
OPTIONS = "_ringloader_options"
# The attribute of a converted loader that names its own attributes which have an option's name.
THEIRS = "_ringloader_theirs"

_MISSING = object()
# All the defaults. Options do not change, so loaders share it.
NONE_GIVEN = Options()
# Options that the program may set on a loader, and that each iterator reads again.
READ_AGAIN = tuple(name for name, about in TABLE.items() if about.is_read_again)


def options_of(loader: object) -> Options:
    """Returns the options of ``loader`` as they are now: all the defaults for one that has none."""
    own = vars(loader)
    options: Options = own.get(OPTIONS, NONE_GIVEN)
    for name in READ_AGAIN:
        kept = getattr(options, name)
        if own.get(name, _MISSING) is kept:
            continue
        value = kept if name in theirs(loader) else getattr(loader, name, kept)
        if value is not kept:
            options = dataclasses.replace(options, **{name: value})
    return options


def has_defaults(own: dict[str, Any]) -> bool:
    """True if :func:`options_of` would find the defaults: a quick look, which may say no all the same.

    Args:
        own: The attributes of a loader.
    """
    if own.get(OPTIONS, NONE_GIVEN).changed:
        return False
    # Each `iter` asks, and a generator expression takes longer.
    for name in READ_AGAIN:  # noqa: SIM110
        if own.get(name, _MISSING) is not DEFAULTS[name]:
            return False
    return True


def has_options(loader: object) -> bool:
    """True for a loader that was made or converted with options."""
    return hasattr(loader, OPTIONS)


def given_to(loader: object, others: dict[str, Any]) -> Options:
    """Returns the options of a loader that is being made.

    Args:
        loader: The loader. ``StatefulDataLoader`` has put its own option there, if it is not the default.
        others: The options that its constructor got and that are not the defaults.

    Raises:
        TypeError: As :class:`Options`.
        ValueError: As :class:`Options`.
    """
    before: Options | None = None if states.of(loader) is None else vars(loader).get(OPTIONS)
    if before is not None:
        others = others | {name: getattr(before, name) for name in _OF_STATES}
    return Options.of(others) if others else NONE_GIVEN


def kept_on(loader: object) -> dict[str, Any]:
    """Returns the options of ``loader``, by their names."""
    options = options_of(loader)
    return {name: getattr(options, name) for name in TABLE}


def put(loader: object, options: Options, before: Options | None = None) -> None:
    """Sets all options on ``loader``, but for those whose attribute is its own.

    Sets an attribute with the name of each option, where code looks that makes such a loader anew:
    Lightning reads the constructor's arguments from there. One that a subclass or the program has set stays.

    Args:
        loader: The loader.
        options: The options that it has from now on.
        before: The options that it had, whose attributes are replaced.
    """
    own = vars(loader)
    theirs_are = own.get(THEIRS, ())
    setattr(loader, OPTIONS, options)
    for name in READ_AGAIN:
        if name not in theirs_are:
            setattr(loader, name, getattr(options, name))
    shown = _SHOWN if states.of(loader) is None else _SHOWN_WITH_STATES
    # Past `_Shown`, and past a framework that replays what is set on a loader.
    if before is None and not theirs_are and _shows_all(type(loader)):
        values = shown if options is NONE_GIVEN else {name: getattr(options, name) for name in shown}
        own.update(values if own.keys().isdisjoint(values) else {**values, **own})
        return
    for name in shown:
        is_ours = before is not None and name in own and own[name] is getattr(before, name)
        # A property of its class is not called: it may need what the constructor of a subclass sets later.
        if name not in theirs_are and (is_ours or not has(loader, name)):
            own[name] = getattr(options, name)


_OF_STATES = tuple(name for name, about in TABLE.items() if about.is_of_states)
# The options that attributes show, with their defaults: in loaders with states, and in others.
# torch sets the attributes of its own arguments.
_SHOWN_WITH_STATES = {
    name: value for name, value in DEFAULTS.items() if name not in READ_AGAIN and not TABLE[name].is_torchs
}
_SHOWN = {name: value for name, value in _SHOWN_WITH_STATES.items() if name not in _OF_STATES}
# Names in a subclass through which its loaders may have other attributes.
_OTHERS = frozenset({*TABLE, "__getattr__", "__getattribute__"})


def _shows_all(cls: Any) -> bool:
    """True if loaders of a class have the attributes of options in their ``__dict__`` only.

    It may say no all the same.
    """
    if type(cls) is not type:
        return False
    for one in cls.__mro__:
        own = vars(one)
        if _PROTECTED not in own:
            if not _OTHERS.isdisjoint(own):
                return False
        elif own[_PROTECTED]:
            return True
    return False


def callables_of(loader: object) -> dict[str, Any]:
    """Returns the functions among the options of ``loader`` that its workers call, by their options."""
    options = options_of(loader)
    called = {name: getattr(options, name) for name, about in TABLE.items() if about.is_called_in_workers}
    return {name: function for name, function in called.items() if callable(function)}


def theirs(loader: object) -> tuple[str, ...]:
    """Returns the options of a converted loader whose attribute is another thing of its own."""
    # Each iter() asks, and a miss of getattr takes long.
    found: tuple[str, ...] = vars(loader).get(THEIRS, ())
    return found


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
        own = vars(loader)
        if own.get(self._name, _MISSING) is value:
            return
        self._check(loader)
        own[self._name] = value

    def __delete__(self, loader: object) -> None:
        self.__get__(loader, type(loader))
        self._check(loader)
        del vars(loader)[self._name]

    def _check(self, loader: object) -> None:
        """Raises where the attribute shows the option, and no subclass has one of its own by that name."""
        own = vars(loader)
        option = getattr(own.get(OPTIONS), self._name, _MISSING)
        if option is _MISSING or own.get(self._name, _MISSING) is not option:
            return
        if _names(type(loader), self._name):
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


def _names(cls: type, name: str) -> bool:
    """True if a method of a subclass names the attribute: it may set one of its own."""
    subclasses = itertools.takewhile(lambda one: _PROTECTED not in vars(one), cls.__mro__)
    methods = (method for one in subclasses for method in vars(one).values())
    return any(isinstance(method, FunctionType) and name in method.__code__.co_names for method in methods)


# The attribute of our classes, whose attributes show options. True for the one that the others derive from.
_PROTECTED = "_ringloader_shows_options"


def shows_options(loader: object) -> bool:
    """True for a loader of our class, whose constructor takes options."""
    return hasattr(type(loader), _PROTECTED)


def protect(cls: type, names: Iterable[str]) -> None:
    """Makes attributes of options read-only in loaders of ``cls``, but where a subclass has its own.

    Args:
        cls: The class.
        names: The options. One that each iterator reads again is left out.
    """
    is_derived = hasattr(cls, _PROTECTED)
    for name in names:
        if not TABLE[name].is_read_again:
            setattr(cls, name, _Shown(name))
    setattr(cls, _PROTECTED, not is_derived)
