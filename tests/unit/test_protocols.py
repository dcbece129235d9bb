"""Calls of the native side to Python: named in one Rust file, in the stub's protocols, and there."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from ringloader._iterator.with_workers import WorkersIterator
from ringloader._sources.samplers import TorchDraws

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "rust/py/src/python.rs").read_text()
STUB = ast.parse((ROOT / "python/ringloader/_native.pyi").read_text())


def called_by(wrapper: str) -> set[str]:
    """The methods that a Rust type calls of the object it wraps."""
    body = NAMES.split(f"impl<'py> {wrapper}<")[1].split("\n}\n")[0]
    return set(re.findall(r'intern!\(self\.py\(\), "(\w+)"\)', body))


def in_stub(protocol: str) -> set[str]:
    body = next(node.body for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == protocol)
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("wrapper", "protocol", "owners"),
    [
        ("Callbacks", "SchedulerCallbacks", [WorkersIterator]),
        # Each kind of sampler is asked only for what torch reads and draws of it.
        ("Draws", "Draws", [TorchDraws, *TorchDraws.__subclasses__()]),
    ],
)
def test_protocols_are_what_is_called_and_what_there_is(wrapper, protocol, owners):
    called = called_by(wrapper)
    assert len(called) >= 5, "the expression above no longer finds anything"
    assert called == in_stub(protocol)
    there = {name for owner in owners for name in called if callable(getattr(owner, name, None))}
    assert there == called


def test_functions_of_our_modules_are_there():
    found = re.findall(r'py\.import\("([\w.]+)"\)\?;?\s*(?:\w+)?\.(?:call_method1|getattr)\("(\w+)"', NAMES)
    assert ("ringloader._placement.failed_arrival", "FailedArrival") in found and len(found) >= 3
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
