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
_NONE_GIVEN = Options()
# Options that the program may set on a loader, and that each iterator reads again.
READ_AGAIN = tuple(name for name, about in TABLE.items() if about.is_read_again)


def options_of(loader: object) -> Options:
    """Returns the options of ``loader`` as they are now: all the defaults for one that has none."""
    own = vars(loader)
    options: Options = own.get(OPTIONS, _NONE_GIVEN)
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
    if own.get(OPTIONS, _NONE_GIVEN).changed:
        return False
    # Each `iter` asks, and a generator expression takes longer.
    for name in READ_AGAIN:  # noqa: SIM110
        if own.get(name, _MISSING) is not DEFAULTS[name]:
            return False
    return True


def has_options(loader: object) -> bool:
    """True for a loader that was made or converted with options."""
    return hasattr(loader, OPTIONS)


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
    setattr(loader, OPTIONS, options)
    for name in TABLE:
        if name in theirs(loader) or (TABLE[name].is_of_states and states.of(loader) is None):
            continue
        is_ours = before is not None and name in own and own[name] is getattr(before, name)
        has_other = not is_ours and _has(loader, name)
        if name in READ_AGAIN:
            setattr(loader, name, getattr(options, name))
        elif not has_other:
            # Past `_Shown`, and past a framework that replays what is set on a loader.
            own[name] = getattr(options, name)


def _has(loader: object, name: str) -> bool:
    """True if ``loader`` has an attribute of that name. A property of its class is not called.

    It may need what the constructor of a subclass sets later.
    """
    return has(loader, name)


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
    for name in names:
        if not TABLE[name].is_read_again:
            setattr(cls, name, _Shown(name))
    setattr(cls, _PROTECTED, True)
