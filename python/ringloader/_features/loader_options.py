"""The options of a loader: the attribute that has them, and the attributes that show them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from ringloader._features.table import TABLE, Options

# The attribute of a loader that has its options.
OPTIONS = "_ringloader_options"
# The attribute of our classes that names the options which attributes of their loaders show.
_SHOWN = "_ringloader_shown"
# All the defaults. Options do not change, so loaders share it.
NONE_GIVEN = Options()


def of(loader: object) -> Options:
    """Returns the options of ``loader``: all the defaults for one that has none."""
    found: Options = vars(loader).get(OPTIONS, NONE_GIVEN)
    return found


def values_of(loader: object) -> dict[str, Any]:
    """Returns the options of ``loader``, by their names."""
    options = of(loader)
    return {name: getattr(options, name) for name in TABLE}


def callables_of(loader: object) -> dict[str, Any]:
    """Returns the functions among the options of ``loader`` that its workers call, by their options."""
    called = {name: value for name, value in values_of(loader).items() if TABLE[name].is_called_in_workers}
    return {name: function for name, function in called.items() if callable(function)}


def are_on(loader: object) -> bool:
    """True for a loader that was made or converted with options."""
    return OPTIONS in vars(loader)


def are_taken_by(loader: object) -> bool:
    """True for a loader of our class, whose constructor takes options."""
    return hasattr(type(loader), _SHOWN)


def put(loader: object, options: Options) -> None:
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


def show(cls: type, names: Iterable[str]) -> None:
    """Makes loaders of ``cls`` show these options in attributes of their names, which cannot be set."""
    # torch sets the attributes of its own arguments.
    shown = tuple(name for name in names if not TABLE[name].is_torchs)
    for name in shown:
        setattr(cls, name, _Shown(name))
    setattr(cls, _SHOWN, shown)
