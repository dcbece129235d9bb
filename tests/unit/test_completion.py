"""Names that an editor finds without running a program, by jedi: Vim, Emacs, Spyder, python-lsp-server."""

from __future__ import annotations

import inspect

import jedi
import pytest

import ringloader
from ringloader._features.table import TABLE

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this process: another one may have written half of a file in jedi's own."""
    monkeypatch.setattr(jedi.settings, "cache_directory", tmp_path_factory.getbasetemp() / "jedi")


def _script(source: str) -> jedi.Script:
    # In this process: the other environments start one, and leave it.
    return jedi.Script(source, environment=jedi.InterpreterEnvironment())


def completed(source: str) -> set[str]:
    """Returns the names that complete the end of a program."""
    lines = source.split("\n")
    found = _script(source).complete(len(lines), len(lines[-1]))
    return {one.name for one in found}


def test_every_public_name_is_found() -> None:
    assert set(ringloader.__all__) <= completed("import ringloader\nringloader.")


def test_arguments_and_attributes_of_a_loader_are_found() -> None:
    source = "from ringloader import DataLoader\n"
    named = {
        f"{name}=" for name in inspect.signature(ringloader.DataLoader).parameters if name.startswith("wor")
    }
    assert len(named) == 6
    assert completed(f"{source}DataLoader([1], wor") == named
    assert {"shutdown", "epoch_stats", "num_workers"} <= completed(
        f"{source}loader = DataLoader([1])\nloader."
    )
    assert {"path", "reason", "counters"} <= completed("import ringloader\nringloader.report(1).")


def test_the_signature_and_its_help_are_found() -> None:
    script = _script("from ringloader import DataLoader\nDataLoader(")
    (signature,) = script.get_signatures(2, len("DataLoader("))
    assert [one.name for one in signature.params] == [*inspect.signature(ringloader.DataLoader).parameters]


def test_each_argument_has_a_line_in_the_help() -> None:
    text = inspect.getdoc(ringloader.DataLoader) or ""
    entries = [line.strip().partition(":")[0] for line in text.splitlines() if line.startswith("    ")]
    parameters = [*inspect.signature(ringloader.DataLoader).parameters]
    # Ours stand by topic.
    assert sorted(name for name in entries if name in parameters) == sorted(parameters)
    assert "pip show" in text


def test_the_types_of_given_options_are_those_that_install_takes() -> None:
    from ringloader._patch.by_name import GivenOptions

    names = [name for name, about in TABLE.items() if about.instead is None]
    assert [*GivenOptions.__annotations__] == names
