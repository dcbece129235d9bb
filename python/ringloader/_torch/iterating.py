"""Runs the code of torch's own iterators, whose warnings still name the caller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch.utils.data import dataloader as torch_dataloader

from ringloader._torch import internals


def get_iterator(
    torchs_own: Any,
    loader: Any,
    make: Callable[[Any], Any],
    make_without_workers: Callable[[Any], Any] | None = None,
) -> Any:
    """Runs torch's own ``DataLoader._get_iterator`` with ``make`` in place of its iterator class.

    So what else it does stays torch's, now and in versions to come: its warnings too, and the file they name.
    """
    # A dict for each call, since threads may iterate at once.
    names = {**_get_iterator_globals, "_MultiProcessingDataLoaderIter": make}
    if make_without_workers is not None:
        names["_SingleProcessDataLoaderIter"] = make_without_workers
    return FunctionType(torchs_own.__code__, names)(loader)


def get_iterator_of_torch(torchs_own: Any, loader: Any, view: Callable[[Any], Any]) -> Any:
    """As torch's own ``_get_iterator``, with ``view(loader)`` in the place of the loader for the iterator."""

    def make(name: str) -> Callable[[Any], Any]:
        return lambda loader: call_from_torch(getattr(torch_dataloader, name), view(loader))

    without_workers = make("_SingleProcessDataLoaderIter")
    return get_iterator(torchs_own, loader, make("_MultiProcessingDataLoaderIter"), without_workers)


# One registry for all calls: a warning that was shown once is not shown again.
_get_iterator_globals = {**internals.dataloader_names, "__warningregistry__": {}}


def _torchs_call() -> Callable[[Callable[[Any], Any], Any], Any]:
    """``function(argument)`` from a frame that passes for torch's own.

    Warnings of torch's constructor name the file that called it, and filters go by that. A traceback shows
    the line: it is that of torch's own call, the last in ``_get_iterator``, and reads like it.
    """
    own = getattr(internals.get_iterator, "__code__", None)
    line = 2 if own is None else max(line for _, _, line in own.co_lines() if line is not None)
    head = "def _get_iterator(_MultiProcessingDataLoaderIter, self):\n"
    body = f"{'':12}return _MultiProcessingDataLoaderIter(self)\n"
    exec(compile("\n" * (line - 2) + head + body, torch_dataloader.__file__, "exec"), _get_iterator_globals)
    return cast(Callable[[Callable[[Any], Any], Any], Any], _get_iterator_globals.pop("_get_iterator"))


call_from_torch = _torchs_call()


class _WarningsFromBeneath:
    """The module ``warnings`` for code of torch's that runs one frame deeper than it takes for granted."""

    def warn(
        self, message: Any, category: type[Warning] | None = None, stacklevel: int = 1, **others: Any
    ) -> None:
        # This frame, and, where the warning names torch's caller, the function of ours which called torch's.
        warnings.warn(message, category, stacklevel + (2 if stacklevel > 1 else 1), **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)


def _from_beneath(function: Any) -> Any:
    """A function of torch's, to be called by one of ours in its place: warnings still name the caller."""
    if not isinstance(function, FunctionType):
        return function
    names = {**function.__globals__, "warnings": _WarningsFromBeneath()}
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


next_from_beneath: Any = _from_beneath(internals.next_of_iterator)
