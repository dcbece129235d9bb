"""What the fork server imports before it forks, so that not every worker must."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

_ALWAYS = ("torch", "numpy", "ringloader._processes")


def preload(context: Any, dataset: object) -> None:
    """Has the fork server import torch and the dataset's module, if it is still to be started.

    One server serves the whole process. Where it runs already, or somebody has said what it imports
    (``multiprocessing.set_forkserver_preload``), nothing changes. What it cannot import, the workers do.

    Args:
        context: The ``multiprocessing`` context that starts the workers.
        dataset: What they will unpickle.
    """
    if context.get_start_method() != "forkserver":
        return
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_forkserver_pid", 0) is not None:
        return
    if getattr(server, "_preload_modules", None) != ["__main__"]:
        return
    module = type(dataset).__module__
    # `__main__` is there by default; a second name would run the program twice.
    modules = [*_ALWAYS, *([module] if module not in ("__main__", "__mp_main__", "builtins") else [])]
    context.set_forkserver_preload(["__main__", *modules])
