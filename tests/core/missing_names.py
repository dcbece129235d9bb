"""Hides private names of torch from ringloader, one in each forked process, and tells what its loader does.

A program of its own: it must not import ringloader. Prints one line of JSON for each name.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from typing import Any

import torch
import torch.utils.data


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


def _needed() -> list[tuple[str, list[str], str]]:
    """Module, classes in it and name of each that ringloader asks for."""
    from ringloader._torch import internals

    found = []
    for owner, name in internals._needed:
        if owner is None:
            found.append(("", [], name))
        elif isinstance(owner, type):
            found.append((owner.__module__, owner.__qualname__.split("."), name))
        else:
            found.append((owner.__name__, [], name))
    return found


def _import() -> None:
    """All of it: the package alone imports nothing of torch."""
    from ringloader import DataLoader

    assert issubclass(DataLoader, torch.utils.data.DataLoader)


def _without(module: str, classes: list[str], name: str) -> dict[str, Any]:
    """Imports ringloader while the name is missing. torch itself, which would be another then, keeps it."""
    if not module:
        kept = sys.modules[name]
        sys.modules[name] = None  # type: ignore[assignment]
        _import()
        sys.modules[name] = kept
    else:
        owner: Any = importlib.import_module(module)
        for part in classes:
            owner = getattr(owner, part)
        if isinstance(owner, type):
            owner = next(cls for cls in owner.__mro__ if name in cls.__dict__)
        value = owner.__dict__[name]
        delattr(owner, name)
        _import()
        setattr(owner, name, value)
    import ringloader

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringloader").addHandler(handler)
    loader = ringloader.DataLoader(Numbers(), num_workers=1)
    values = [batch.tolist() for _ in range(2) for batch in loader]
    report = ringloader.report(loader)
    return {"values": values, "path": report.path, "reason": report.reason, "said": said}


def _in_child(function: Any, *args: Any) -> Any:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = function(*args)
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    return answer


def main() -> None:
    """Asks for the names in a child too: here ringloader must not be imported."""
    torch.set_num_threads(1)
    for module, classes, name in _in_child(_needed):
        answer = _in_child(_without, module, classes, name)
        print(json.dumps({"name": ".".join([module, *classes, name]).strip("."), **answer}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
