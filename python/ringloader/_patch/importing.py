"""Work that waits for the import of a module. Imports no torch, and little else."""

from __future__ import annotations

import sys

# The one in typing takes milliseconds to import, and this module is imported before every program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any


def after(name: str, action: Callable[[], None], log: Callable[[Exception], None] | None = None) -> None:
    """Calls ``action`` once a module is imported; now if it is already.

    Args:
        name: The module's full name.
        action: Is called once. It replaces an action that waits for the same module.
        log: Is called with an error, which then stops nothing; None: errors are raised.
    """
    forget(name)
    finder = _Finder(name, action, log)
    if name in sys.modules:
        finder.act()
    else:
        sys.meta_path.insert(0, finder)


def forget(name: str) -> None:
    """Drops the action that waits for a module, if there is one."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)
    ]


class _Finder:
    """Finds nothing itself. The loader that is found for one module does one thing more."""

    def __init__(
        self, name: str, action: Callable[[], None], log: Callable[[Exception], None] | None
    ) -> None:
        self.name, self._action, self._log = name, action, log

    def act(self) -> None:
        """Does the action."""
        try:
            self._action()
        except Exception as error:
            if self._log is None:
                raise
            self._log(error)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            # Finders of old, which Python passes over, have no such method.
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            found: ModuleSpec | None = None if find_spec is None else find_spec(name, path, target)
            if found is not None:
                self._follow(found.loader)
                return found
        return None

    def _follow(self, loader: Any) -> None:
        """Does the action once ``loader`` has executed the module. After that the loader is as before."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            # The action may have been forgotten since the loader was found.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.act()

        loader.exec_module = exec_module
