"""Calls in processes of their own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class ProcessFailedError(Exception):
    """The process raised, died or took too long."""


def _call(
    connection: Connection, start_method: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # Else the loaders' workers would be started by the method that started this process.
    multiprocessing.set_start_method(start_method, force=True)
    # More workers than cores are meant, and every run would say so.
    warnings.simplefilter("ignore", UserWarning)
    try:
        connection.send((None, function(*arguments)))
    except Exception as error:
        connection.send((f"{type(error).__name__}: {error}", None))


def template_pid() -> int | None:
    """The process that this one is a copy of, where ``call_in_process`` made it by ``forkserver``."""
    asked_by = multiprocessing.parent_process()
    return None if asked_by is None or asked_by.pid == os.getppid() else os.getppid()


def named(function: str, *arguments: Any) -> Any:
    """Calls a function of this package by its name, ``module.function``, which only then is imported."""
    module, name = function.split(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*arguments)


def call_in_process(
    method: str, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0
) -> Any:
    """``function(*arguments)`` in a new process, in which loaders start workers as they do by default.

    Args:
        method: ``spawn`` for a new interpreter; ``forkserver`` for a copy of a process that has only
            imported torch and this package, which starts sooner.
        function: a function of a module.
        arguments: picklable.
        timeout: seconds until the process is killed.

    Raises:
        ProcessFailedError: with what the process raised, its exit code, or the timeout.
    """
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch", "benches.python.ideal"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_call, args=(theirs, multiprocessing.get_start_method(), function, arguments)
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise ProcessFailedError(f"no result after {timeout:.0f} s")
        error, result = ours.recv()
    except EOFError:
        process.join()
        raise ProcessFailedError(f"ended with exit code {process.exitcode} and no result") from None
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    if error is not None:
        raise ProcessFailedError(error)
    return result
