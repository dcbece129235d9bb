"""The work of ``install()`` without importing torch: done once the program imports torch, if it ever does.

Nothing here may stop a program: what goes wrong is one line on standard error, and torch's own loader.
"""

from __future__ import annotations

import sys

# The one in typing takes milliseconds to import, and this module is imported before every program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

# The variable names options, so that children of any kind have them; "0" and nothing mean no.
VARIABLE = "RINGLOADER_INSTALL"

_MODULE = "torch.utils.data.dataloader"


def install_with_torch(text: str) -> None:
    """Installs once torch's loader is imported, now if it is already.

    Args:
        text: The options, as in the environment: ``1``, or ``name=value`` with commas between.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if _MODULE in sys.modules:
        _install(text)
    else:
        sys.meta_path.insert(0, _Finder(text))


class _Finder:
    """Finds nothing itself. The loader that is found for one module does one thing more."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None:
                try:
                    _then(found.loader, self._installed)
                except Exception as error:
                    _say(error)
                return found
        return None

    def _installed(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _install(self._text)


def _then(loader: Any, action: Callable[[], None]) -> None:
    """Has ``action`` called once ``loader`` has executed the module; the loader is as it was before that."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        if module.__name__ == _MODULE:
            vars(loader).pop("exec_module", None)
        execute(module)
        if module.__name__ == _MODULE:
            action()

    loader.exec_module = exec_module


def _install(text: str) -> None:
    # torch is half imported: nothing may be imported here that needs it.
    try:
        from ringloader._options import naming
        from ringloader._torch import hook

        options = naming.from_text(text)
        loader_class = sys.modules[_MODULE].DataLoader
    except Exception as error:
        _say(error)
        return

    def make(loader: Any, previous: Callable[[Any], Any]) -> Any:
        try:
            # Imported here, so that a module or a device that is not there is reported here.
            import ringloader.dataloader  # noqa: F401
            from ringloader._patch import install
            from ringloader._torch import devices

            devices.resolve(options.device)
        except Exception as error:
            hook.put(loader_class, None)
            _say(error)
            return previous(loader)
        return install.make_iterator(options, loader, previous)

    hook.put(loader_class, make)


def _say(error: Exception) -> None:
    if sys.stderr is not None:
        text = f"ringloader: {VARIABLE} has no effect: {type(error).__name__}: {error}"
        print(text.replace("\n", " "), file=sys.stderr)  # noqa: T201
