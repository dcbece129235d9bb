"""All private names of torch stand in one folder, and one that is missing makes the loader torch's."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringloader
from ringloader._torch import internals

PACKAGE = Path(ringloader.__file__).parent
TORCH = PACKAGE / "_torch"
RUST = Path(__file__).resolve().parents[2] / "rust" / "py" / "src"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> list[str]:
    """Returns the private names that a module imports from torch, or reads off what it imported."""
    tree = ast.parse(source)
    roots = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            roots |= {alias.asname or "torch" for alias in names}
            found += [alias.name for alias in names if any(map(is_private, alias.name.split(".")))]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in dotted if any(map(is_private, name.split(".")))]
    for node in ast.walk(tree):
        parts = []
        place: ast.AST = node
        while isinstance(place, ast.Attribute):
            parts.append(place.attr)
            place = place.value
        if isinstance(place, ast.Name) and place.id in roots and any(map(is_private, parts)):
            found.append(".".join([place.id, *reversed(parts)]))
    return found


def test_private_names_of_torch_stand_in_one_folder():
    assert private_names((TORCH / "internals.py").read_text())
    others = [file for file in PACKAGE.rglob("*.py") if file.parent != TORCH]
    found = {str(file): private_names(file.read_text()) for file in others}
    assert not any(found.values()), found
    assert private_names("from torch._utils import X") and private_names("import torch\ntorch.a._b.c")


def test_the_binary_asks_that_module():
    imported = {
        name
        for file in RUST.rglob("*.rs")
        for name in re.findall(r'py\.import\("([^"]+)"\)', file.read_text())
    }
    ours = {name for name in imported if name.startswith("ringloader.")}
    assert "ringloader._torch.internals" in ours
    assert imported - ours == {"torch", "numpy"}


def test_nothing_is_missing_in_this_torch():
    assert internals.missing_name() is None


@pytest.fixture(scope="module")
def answers():
    program = Path(__file__).with_name("missing_names.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=110, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_missing_name_means_torch(answers):
    assert len(answers) == len(internals._needed) > 20
    for answer in answers:
        assert "failed" not in answer, f"{answer['name']}: {answer['failed']}"
        assert answer["values"] == [[0], [1], [2], [3], [4]] * 2, answer
        assert answer["path"] == "torch", answer
        last = answer["name"].split(".")[-1]
        assert last in answer["reason"], answer
        assert len(answer["said"]) == 1 and answer["reason"] in answer["said"][0], answer


def test_an_attribute_that_torch_no_longer_sets_is_missing(monkeypatch):
    monkeypatch.setattr(internals, "_ATTRIBUTES", ("_workers", "_none_such"))
    assert internals._missing_attributes() == ["_MultiProcessingDataLoaderIter._none_such"]
