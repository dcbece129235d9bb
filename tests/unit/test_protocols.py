"""Calls of the native side to Python: named in one Rust file, in the stub's protocols, and there."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from ringloader._iterator.with_workers import WorkersIterator
from ringloader._sources.draws import NoDraws

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
    ("wrapper", "protocol", "owner"),
    [("Callbacks", "SchedulerCallbacks", WorkersIterator), ("Draws", "Draws", NoDraws)],
)
def test_protocols_are_what_is_called_and_what_there_is(wrapper, protocol, owner):
    called = called_by(wrapper)
    assert len(called) >= 5, "the expression above no longer finds anything"
    assert called == in_stub(protocol)
    assert {name for name in called if not callable(getattr(owner, name, None))} == set()


def test_functions_of_our_modules_are_there():
    found = re.findall(r'py\.import\("([\w.]+)"\)\?;?\s*(?:\w+)?\.(?:call_method1|getattr)\("(\w+)"', NAMES)
    assert ("ringloader._placement.failed_arrival", "FailedArrival") in found and len(found) >= 3
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
