"""A real accelerator in place of the pretend one: the same tests, if a device can be watched for them.

Nothing is counted, delayed or made to fail on it. A test that asks for one of these is skipped there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ringloader._features.device.registration import registrars

from . import pretend


class NoAcceleratorError(Exception):
    """torch finds none."""


def put_in_place() -> None:
    """Has what tests ask of the pretend accelerator answered for the real one.

    Raises:
        NoAcceleratorError: There is none.
    """
    if not torch.accelerator.is_available():
        raise NoAcceleratorError("torch finds no accelerator")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    changed: dict[str, Any] = {
        "NAME": found.type,
        "DEVICES": torch.accelerator.device_count(),
        "load": _nothing,
        "set_delay": _nothing,
        "set_delay_range": _nothing,
        "set_poison": _nothing,
        "set_unguarded": _skip,
        "delayed": _undelayed,
        "reset": _synchronize,
        "synchronize": _synchronize,
        "violations": list,
        "counters": _skip,
        "fail": _skip,
        "host_register": _registrar(found.type, "register"),
        "host_unregister": _registrar(found.type, "unregister"),
    }
    for name, value in changed.items():
        assert hasattr(pretend, name), name
        setattr(pretend, name, value)


def _registrar(device_type: str, name: str) -> Callable[..., None]:
    def refuse(*_args: int) -> None:
        raise RuntimeError(f"ringloader does not register memory for {device_type} devices")

    return getattr(registrars.get(device_type), name, refuse)


def _nothing(*_args: Any, **_options: Any) -> None:
    pass


@contextlib.contextmanager
def _undelayed(_microseconds: int) -> Iterator[None]:
    yield


def _synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def _skip(*_args: Any, **_options: Any) -> Any:
    pytest.skip("a real device does not count, and does not fail when it is asked to")
