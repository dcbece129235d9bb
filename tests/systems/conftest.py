"""Tests for systems without rings. `make systems` runs them, in an environment with the wheel for these."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import ringloader._native as _native
from systems import lacking

# Everywhere else they would say nothing.
collect_ignore_glob = ["test_*.py"] if _native.SUPPORTED else []


@pytest.fixture
def system() -> str:
    return os.environ[lacking.VARIABLE]


@pytest.fixture(autouse=True)
def _texts_anew(monkeypatch):
    """The log names again what it names once in a process."""
    from ringloader._torch import select_path

    monkeypatch.setattr(select_path, "_logged", set())


@pytest.fixture(autouse=True)
def _spawned(monkeypatch):
    """Workers start as both systems start them, and find the tests."""
    import multiprocessing

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield
    multiprocessing.set_start_method(before, force=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
