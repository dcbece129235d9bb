"""Classes of loaders whose iterators the hook cannot reach: each gets a line of the log. Imports no torch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ringloader._log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "_get_iterator"
_NEW_CLASS = "__init_subclass__"
# The method of a class that our function replaces until the class makes its first iterator.
_watched: weakref.WeakKeyDictionary[type, tuple[Any, FunctionType]] = weakref.WeakKeyDictionary()
_told: weakref.WeakSet[type] = weakref.WeakSet()
# Is told of such a loader, and the reason, when it begins an iterator.
_note: Callable[[object, str], None] | None = None
# True if all of them are told, and not only the first one of a class.
_notes_all = False


def owner_of(loader: object, loader_class: Any) -> str | None:
    """Returns the class or object that makes a loader's iterator without torch's method, or None.

    Args:
        loader: A loader.
        loader_class: torch's class.
    """
    if _NAME in getattr(loader, "__dict__", ()):
        return "the object"
    for cls in type(loader).__mro__:
        if cls is loader_class:
            return None
        if _is_own(cls):
            return _name(cls)
    return None


def reason(owner: str) -> str:
    """Returns the reason why torch's loader runs, for what makes its iterator itself."""
    return f"{owner} has a _get_iterator that does not call torch's"


def note(listener: Callable[[object, str], None], is_for_all: bool) -> None:
    """Tells ``listener`` of the loaders that are not reached from now on, and the reason, when they iterate.

    Args:
        listener: Is called with a loader and the reason.
        is_for_all: False for the first loader of each class only.
    """
    global _note, _notes_all
    _note, _notes_all = listener, is_for_all


def watch(loader_class: Any, is_wanted: bool) -> None:
    """Logs, or no longer logs, which subclasses are not reached, when they make their first iterator.

    Args:
        loader_class: torch's class, whose subclasses of today and later ones are meant.
        is_wanted: False to stop.
    """
    for cls, (ours, theirs) in list(_watched.items()):
        _put_back(cls, ours, theirs)
    found = vars(loader_class).get(_NEW_CLASS)
    if getattr(found, "__func__", None) is _watch_new_class:
        delattr(loader_class, _NEW_CLASS)
        found = None
    if not is_wanted:
        return
    for cls in _subclasses(loader_class):
        _watch(cls)
    if found is None:
        _watch_new_class.of = loader_class  # type: ignore[attr-defined]
        setattr(loader_class, _NEW_CLASS, classmethod(_watch_new_class))


def _watch_new_class(cls: Any, /, *args: Any, **kwargs: Any) -> None:
    super(_watch_new_class.of, cls).__init_subclass__(*args, **kwargs)  # type: ignore[attr-defined]
    _watch(cls)


def _subclasses(cls: Any) -> Iterator[Any]:
    for one in type.__subclasses__(cls):
        yield one
        yield from _subclasses(one)


def _is_own(cls: Any) -> bool:
    """True if a class has a method of its own that does not go on to the next class: that would name it."""
    found = vars(cls).get(_NAME)
    if cls in _watched and found is _watched[cls][0]:
        return True
    if found is None:
        return False
    # Inside decorators, too.
    while isinstance(found, FunctionType):
        if _NAME in found.__code__.co_names:
            return False
        found = getattr(found, "__wrapped__", None)
    return True


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _watch(cls: Any) -> None:
    theirs = vars(cls).get(_NAME)
    is_done = cls in _watched or (cls in _told and not _notes_all)
    if not isinstance(theirs, FunctionType) or is_done or not _is_own(cls):
        return

    @functools.wraps(theirs)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _notes_all:
            _put_back(cls, ours, theirs)
        _log(cls)
        if _note is not None:
            _note(self, reason(_name(cls)))
        return theirs(self, *args, **kwargs)

    _watched[cls] = ours, theirs
    type.__setattr__(cls, _NAME, ours)


def _put_back(cls: Any, ours: Any, theirs: FunctionType) -> None:
    _watched.pop(cls, None)
    if vars(cls).get(_NAME) is ours:
        type.__setattr__(cls, _NAME, theirs)


def _log(cls: Any) -> None:
    if cls not in _told:
        _told.add(cls)
        logger.warning(
            "torch's own loader runs: %s, so ringloader.install() does not reach it", reason(_name(cls))
        )
