"""Protocols: the calls of the native side to Python, and the attributes of loaders and iterators.

The calls are named in one Rust file, in the stub's protocols, and are there. The attributes are on torch's
objects and on ours, and are read. ``tests/typed/attributes.py`` shows that mypy refuses others.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch.utils.data
from torch.utils.data.datapipes.iter import IterableWrapper

import ringloader
from ringloader._common import protocols as ours
from ringloader._core.with_workers import WorkersIterator
from ringloader._sources.samplers import TorchDraws
from ringloader._torch import protocols as torchs

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "rust/py/src/python.rs").read_text()
STRINGS = dict(re.findall(r'(\w+) = "(\w+)",', NAMES))
PACKAGE = ROOT / "python/ringloader"
STUB = ast.parse((ROOT / "python/ringloader/_native.pyi").read_text())


def called_by(wrapper: str) -> set[str]:
    """The methods that a Rust type calls of the object it wraps."""
    body = NAMES.split(f"impl<'py> {wrapper}<")[1].split("\n}\n")[0]
    return {STRINGS[name] for name in re.findall(r"names::(\w+)\(self\.py\(\)\)", body)}


def in_stub(protocol: str) -> set[str]:
    body = next(node.body for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == protocol)
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("wrapper", "protocol", "owners"),
    [
        ("Callbacks", "SchedulerCallbacks", [WorkersIterator]),
        ("Draws", "Draws", [TorchDraws]),
    ],
)
def test_protocols_are_what_is_called_and_what_there_is(wrapper, protocol, owners):
    called = called_by(wrapper)
    assert len(called) >= 3, "the expression above no longer finds anything"
    assert called == in_stub(protocol)
    there = {name for owner in owners for name in called if callable(getattr(owner, name, None))}
    assert there == called


def test_functions_of_our_modules_are_there():
    found = re.findall(r'py\.import\("([\w.]+)"\)\?;?\s*(?:\w+)?\.(?:call_method1|getattr)\("(\w+)"', NAMES)
    assert ("ringloader._transport.overdue", "FailedArrival") in found and len(found) >= 3
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


# Objects of an unknown class: the import system's, and an iterator that code of the program may have made.
UNKNOWN = {"_patch/importing.py": "loader", "_core/torchs.py": "iterator", "_core/notes.py": "iterator"}


def attributes_of(protocol: type) -> set[str]:
    """The attributes that a protocol declares, without those of its bases."""
    body = ast.parse(inspect.getsource(protocol)).body[0].body
    declared = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    return declared | {node.name for node in body if isinstance(node, ast.FunctionDef)}


def made(loader_class: type) -> tuple[object, object]:
    """A loader with a worker and a DataPipe, which has all attributes, and its iterator."""
    loader = loader_class(IterableWrapper([1, 2]), num_workers=1)
    return loader, iter(loader)


def test_torchs_loaders_and_iterators_have_the_attributes_that_are_read():
    loader, iterator = made(torch.utils.data.DataLoader)
    assert len(attributes_of(torchs.TorchLoader)) > 20 and len(attributes_of(torchs.TorchIterator)) >= 8
    assert {name for name in attributes_of(torchs.TorchLoader) if not hasattr(loader, name)} == set()
    assert {name for name in attributes_of(torchs.TorchIterator) if not hasattr(iterator, name)} == set()


def test_our_iterators_have_the_attributes_that_are_read():
    _, iterator = made(ringloader.DataLoader)
    assert type(iterator) is WorkersIterator
    for protocol in (torchs.TorchIterator, ours.OurIterator, ours.OurWorkersIterator):
        assert {name for name in attributes_of(protocol) if not hasattr(iterator, name)} == set()
    without = iter(ringloader.DataLoader([1, 2]))
    assert {name for name in attributes_of(ours.OurIterator) if not hasattr(without, name)} == set()


def test_every_attribute_of_the_protocols_is_read():
    text = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    read = {kind: set(re.findall(rf"\b{kind}\.(\w+)", text)) for kind in ("loader", "iterator")}
    assert attributes_of(torchs.TorchLoader) - read["loader"] == {"__iter__"}
    for protocol, syntax in (
        (torchs.TorchIterator, {"__next__"}),
        (ours.OurIterator, set()),
        (ours.OurWorkersIterator, set()),
    ):
        assert attributes_of(protocol) - read["iterator"] == syntax


def named_any(node: ast.AST) -> str | None:
    """The name of a parameter or attribute that is declared as ``Any``."""
    name = node.arg if isinstance(node, ast.arg) else getattr(getattr(node, "target", None), "id", None)
    annotation = getattr(node, "annotation", None)
    return name if isinstance(annotation, ast.Name) and annotation.id == "Any" else None


def test_loaders_and_iterators_have_types():
    found = {
        (str(file.relative_to(PACKAGE)), named_any(node))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    }
    assert {(file, name) for file, name in found if name in ("loader", "iterator")} == set(UNKNOWN.items())
