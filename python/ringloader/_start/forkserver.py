"""Modules that the fork server imports before it forks, so that not every worker must."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

_MODULES = ["__main__", "torch", "numpy.random", "ringloader._worker.entry"]


def preload(context: Any) -> None:
    """Has the fork server import torch, if it is still to be started.

    One server serves the whole process. Where it runs already, or the program has said what it imports
    (``multiprocessing.set_forkserver_preload``), nothing changes.

    No module of the user's: the server looks for it in other places than the program does, ends if the
    module's import raises, and would give what the module opens or draws to all workers alike.

    Args:
        context: The ``multiprocessing`` context that starts the workers.
    """
    if context.get_start_method() != "forkserver":
        return
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_forkserver_pid", 0) is None and getattr(server, "_preload_modules", None) == [
        "__main__"
    ]:
        context.set_forkserver_preload(_MODULES)
