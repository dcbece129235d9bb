"""A case for each option that a loader can have after its constructor: the options, given together."""

from __future__ import annotations

from typing import Any


def told(*_: Any) -> None:
    """Stands for any function that an option takes."""


_ALONE: dict[str, Any] = {
    "max_shared_bytes": 64 << 20,
    "device": "cpu",
    "device_prefetch": 3,
    "main_prefetch": 2,
    "worker_method": "thread",
    "worker_task": "sample",
    "worker_concurrency": 3,
    "worker_reset_fn": told,
    "seeding": "sample",
    "restart_workers": 3,
    "sample_timeout": 60.0,
    "on_error": "skip",
    "watchdog": 5.0,
    "stats": True,
    "num_workers": "auto",
}
# Options that are nothing without another one.
_BESIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "device_transform": (told, {"device": "cpu"}),
    "seed": (7, {"seeding": "epoch"}),
    "max_errors": (4, {"on_error": "skip"}),
}
CASES: dict[str, dict[str, Any]] = {name: {name: value} for name, value in _ALONE.items()}
CASES |= {name: {name: value, **others} for name, (value, others) in _BESIDE.items()}
