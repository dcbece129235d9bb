"""Installs ringloader with torch where the environment asks for it. Called at every start of Python."""

import os
import sys

_started = False


def start() -> None:
    """Does nothing without ``RINGLOADER_INSTALL``, and never raises."""
    global _started
    # In a virtual environment, site reads its .pth files twice.
    if _started:
        return
    _started = True
    text = os.environ.get("RINGLOADER_INSTALL", "0")
    if text in ("", "0"):
        return
    try:
        from ringloader._patch import on_import

        on_import.install_with_torch(text)
    except Exception as error:
        if sys.stderr is not None:
            said = f"ringloader: RINGLOADER_INSTALL has no effect: {type(error).__name__}: {error}"
            print(said.replace("\n", " "), file=sys.stderr)  # noqa: T201
