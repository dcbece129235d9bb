"""ringloader's loader in the place of torchdata's ``StatefulDataLoader``, by the names that modules have.

Imports no torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import ringloader._native as _native
from ringloader._log import logger
from ringloader._patch import importing

MODULE = "torchdata.stateful_dataloader"
_NAME = "StatefulDataLoader"

# torchdata's class while ours is in its place.
_theirs: Any = None
# Namespaces of modules, with their names for torchdata's class.
_replaced: list[tuple[dict[str, Any], str]] = []
# Namespaces that had our class by torchdata's name before.
_left: list[dict[str, Any]] = []


def check(function: str) -> None:
    """Checks that there is a torchdata to replace the class of, and a class of ours for its place.

    Raises:
        ModuleNotFoundError: If there is no torchdata.
        RuntimeError: On other systems than Linux.
    """
    _check_system(f"{function} got")
    if MODULE not in sys.modules and importlib.util.find_spec("torchdata") is None:
        raise ModuleNotFoundError(
            f"{function} got stateful=True, and torchdata, whose StatefulDataLoader it replaces, is not "
            "installed: install torchdata 0.8 or newer, or leave stateful out and use "
            "ringloader.StatefulDataLoader",
            name="torchdata",
        )


def _check_system(function: str) -> None:
    if not _native.SUPPORTED:
        raise RuntimeError(f"{function} stateful=True, which needs Linux: leave stateful out on this system")


def is_put() -> bool:
    """True if our class is in the place of torchdata's, or will be once torchdata is imported."""
    return _theirs is not None or importing.is_waited_for(MODULE)


def put(is_wanted: bool, say: Callable[[Exception], None] | None = None) -> None:
    """Puts our class in the place of torchdata's, once that is imported; False puts torchdata's back.

    Args:
        is_wanted: True for our class.
        say: Is called with an error, which then stops nothing; None: errors are raised.
    """
    if not is_wanted:
        importing.forget(MODULE)
        _put_back()
    elif _theirs is None:
        importing.after(MODULE, _replace, say)


def _replace() -> None:
    global _theirs
    _check_system("there is")
    import ringloader.stateful_dataloader

    ours = ringloader.stateful_dataloader.StatefulDataLoader
    theirs = getattr(sys.modules[MODULE], _NAME)
    for namespace in _namespaces():
        if namespace.get(_NAME) is ours:
            _left.append(namespace)
        for name in [name for name, value in list(namespace.items()) if value is theirs]:
            namespace[name] = ours
            _replaced.append((namespace, name))
    # Only now: this module's own name for it must stay.
    _theirs = theirs
    if made := sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in theirs.__subclasses__()):
        logger.warning(
            "stateful=True came after these subclasses of torchdata's StatefulDataLoader, which stay "
            "torchdata's: %s. Install before the import of their modules",
            ", ".join(made),
        )


def _put_back() -> None:
    global _theirs
    if _theirs is None:
        return
    ours = sys.modules["ringloader.stateful_dataloader"].StatefulDataLoader
    # Modules that were imported meanwhile have our class by torchdata's name.
    for namespace, name in [*_replaced, *((namespace, _NAME) for namespace in _namespaces())]:
        if namespace.get(name) is ours and not any(namespace is left for left in _left):
            namespace[name] = _theirs
    _replaced.clear()
    _left.clear()
    _theirs = None


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yields the namespaces of all imported modules but ours, whose name for the class is torchdata's.

    It has no side effects of modules that load late.
    """
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] != "ringloader":
            yield object.__getattribute__(module, "__dict__")
