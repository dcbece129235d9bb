"""The work of ``install()`` without importing torch: done once the program imports torch, if it ever does."""

from __future__ import annotations

import sys

from ringloader._patch import importing

# The one in typing takes milliseconds to import, and this module is imported before every program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ringloader._torch.protocols import TorchLoader

# The variable names options, so that children of any kind have them; "0" and nothing mean no.
VARIABLE = "RINGLOADER_INSTALL"

_MODULE = "torch.utils.data.dataloader"


def install_with_torch(text: str) -> None:
    """Installs once torch's loader is imported, now if it is already.

    No error stops the program: it is one line on standard error, and torch's own loader runs.

    Args:
        text: The options, as in the environment: ``1``, or ``name=value`` with commas between.
    """
    importing.after(_MODULE, lambda: _install(text), _log)


def _install(text: str) -> None:
    # torch is half imported: nothing may be imported here that needs it.
    from ringloader._features.report import at_exit
    from ringloader._patch import by_name, stateful
    from ringloader._torch import hook

    options, is_stateful = by_name.from_text(text)
    loader_class = sys.modules[_MODULE].DataLoader

    def make(loader: TorchLoader, previous: Callable[[Any], Any]) -> Any:
        try:
            # Imported here, so that a missing module or device is reported here.
            import ringloader.dataloader  # noqa: F401
            from ringloader._features.devices import resolve
            from ringloader._patch import install

            resolve(options.device)
        except Exception as error:
            hook.put(loader_class, None)
            stateful.put(False)
            _log(error)
            return previous(loader)
        return install.make_iterator(options, loader, previous)

    at_exit.begin()
    hook.put(loader_class, make)
    stateful.put(is_stateful, _log)


def say_if_missing() -> None:
    """Says that the environment asks for ringloader, where the package that reads it is missing."""
    # `python -m ringloader` needs no package, and for processes of multiprocessing their parent has said so.
    is_child = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
    if is_child or getattr(sys, "argv", [])[:1] == ["-m"]:
        return
    import importlib.util

    if importlib.util.find_spec(_PACKAGE) is None:
        _say("the package ringloader-autoinstall is not installed here, which reads it when Python starts")


# The module of that package.
_PACKAGE = "ringloader_autoinstall"


def _log(error: Exception) -> None:
    _say(f"{type(error).__name__}: {error}")


def _say(why: str) -> None:
    if sys.stderr is not None:
        text = f"ringloader: {VARIABLE} has no effect: {why}"
        print(text.replace("\n", " "), file=sys.stderr)  # noqa: T201
