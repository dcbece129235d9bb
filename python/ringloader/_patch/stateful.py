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

# True if our class is in the place of torchdata's, or will be once torchdata is imported.
is_put = False
# Namespaces of modules, with their names for torchdata's class, and the class.
_replaced: list[tuple[dict[str, Any], str, Any]] = []


def check(function: str) -> None:
    """Checks that there is a torchdata to replace the class of, and a class of ours for its place.

    Raises:
        ModuleNotFoundError: If there is no torchdata.
        RuntimeError: On other systems than Linux.
    """
    if not _native.SUPPORTED:
        raise RuntimeError(f"{function} got stateful=True, which needs Linux: leave stateful out here")
    if MODULE not in sys.modules and importlib.util.find_spec("torchdata") is None:
        raise ModuleNotFoundError(
            f"{function} got stateful=True, and torchdata, whose StatefulDataLoader it replaces, is not "
            "installed: install torchdata 0.8 or newer, or leave stateful out and use "
            "ringloader.StatefulDataLoader",
            name="torchdata",
        )


def put(is_wanted: bool, say: Callable[[Exception], None] | None = None) -> None:
    """Puts our class in the place of torchdata's, once that is imported; False puts torchdata's back.

    Args:
        is_wanted: True for our class.
        say: Is called with an error, which then stops nothing; None: errors are raised.
    """
    global is_put
    if is_wanted and not is_put:
        importing.after(MODULE, _replace, say)
    elif not is_wanted:
        importing.forget(MODULE)
        for namespace, name, theirs in _replaced:
            namespace[name] = theirs
        _replaced.clear()
    is_put = is_wanted


def _replace() -> None:
    check("ringloader")
    import ringloader.stateful_dataloader

    theirs = sys.modules[MODULE].StatefulDataLoader
    for namespace in _namespaces():
        for name in [name for name, value in list(namespace.items()) if value is theirs]:
            namespace[name] = ringloader.stateful_dataloader.StatefulDataLoader
            _replaced.append((namespace, name, theirs))
    if made := sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in theirs.__subclasses__()):
        logger.warning(
            "stateful=True came after these subclasses of torchdata's StatefulDataLoader, which stay "
            "torchdata's: %s. Install before the import of their modules",
            ", ".join(made),
        )


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yields the namespaces of all imported modules but ours, whose name for the class is torchdata's.

    It has no side effects of modules that load late.
    """
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] != "ringloader":
            yield object.__getattribute__(module, "__dict__")
