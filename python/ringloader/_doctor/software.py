"""The software that is installed, and any of it that would keep a loader off the native path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import numpy
import torch
import torch.utils.data

import ringloader._native as _native
from ringloader._doctor.diagnosis import Finding
from ringloader._torch import devices, hook, internals, select_path


def findings() -> Iterator[Finding]:
    """Yields the findings, in the order in which they are printed."""
    yield Finding("ringloader", _version("ringloader"))
    yield Finding("python", f"{platform.python_implementation()} {platform.python_version()}{_build()}")
    yield Finding("torch", torch.__version__)
    yield Finding("numpy", numpy.__version__)
    yield _accelerator()
    yield _path()
    yield _installed()
    yield from _environment()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _build() -> str:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "" if with_lock else ", without the interpreter lock"


def _accelerator() -> Finding:
    bad = devices.device_in_bad_fork()
    if bad is not None:
        return Finding(
            "accelerator",
            f"{bad}, initialised before this process was forked",
            "note",
            "It cannot be used in this process.",
        )
    if not torch.accelerator.is_available():
        return Finding("accelerator", "none")
    device = torch.accelerator.current_accelerator()
    return Finding("accelerator", f"{device}, {torch.accelerator.device_count()} of them")


def _path() -> Finding:
    """Returns the path that a plain loader with workers would take."""
    if not _native.SUPPORTED:
        return Finding(
            "path",
            "torch",
            "problem",
            "This build has no shared-memory rings, which need Linux: loaders behave as torch's.",
        )
    try:
        reason = select_path.reason_of_user()
    except ValueError as error:
        return Finding("path", "none", "problem", f"No loader can be iterated: {error}.")
    if reason is not None:
        return Finding("path", "torch", "note", f"{reason.text}: torch's own loader runs.")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(1)), num_workers=1)
    reason = select_path.reason_for_torch(loader, hook.beneath(internals.Loader._get_iterator))
    if reason is not None:
        return Finding("path", "torch", "problem", f"{reason.text}: torch's own loader runs.")
    return Finding("path", "native")


def _installed() -> Finding:
    return Finding("install()", "not in effect" if hook.current() is None else "in effect")


def _environment() -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith("RINGLOADER_") or name in _OTHERS)
    yield Finding("environment", ", ".join(f"{name}={os.environ[name]}" for name in names) or "nothing set")


# Variables of other projects that docs/options.md lists.
_OTHERS = {
    select_path.SWITCH,
    "GLIBC_TUNABLES",
    "LOCAL_WORLD_SIZE",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
}
