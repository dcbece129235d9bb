"""Every framework that is tested has its row and its package, and no other is named."""

import re
import tomllib

from frameworks import packages, pages

ROOT = pages.FOLDER.parents[1]


def test_each_framework_has_tests_and_a_row():
    files = set(packages.FRAMEWORKS)
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/frameworks").glob("test_*.py")}
    # The report at exit is about several of them.
    assert tests - {"reports"} == files
    index = pages.INDEX.read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+ [\d.]+) \| [^|]+ \|$", index, re.M)
    names = {re.sub(r" [\w.]+$", "", part) for row in rows for part in row.split(", ")}
    assert names == {name for file in files for name in packages.names(file)}
    assert set(pages.named()) == files


def test_the_pages_are_those_of_the_table():
    linked = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|", pages.INDEX.read_text(), re.M)
    assert {path.stem for path in pages.FOLDER.glob("*.md")} == {*linked, "README"}
    assert set(linked) <= set(packages.FRAMEWORKS)


def test_versions_of_a_run_are_written(tmp_path, monkeypatch):
    index = tmp_path / "README.md"
    index.write_text(pages.INDEX.read_text())
    monkeypatch.setattr(pages, "INDEX", index)
    before = pages.named()
    monkeypatch.setattr(packages, "version", lambda _: "9.9.1")
    pages.write(["trl", "torchrun"])
    after = pages.named()
    assert {file for file in after if after[file] != before[file]} == {"trl", "torchrun"}
    assert "| trl 9.9.1, peft 9.9.1 |" in index.read_text()
    assert "with torch 9.9.1 and CPython " in index.read_text()


def test_the_packages_are_those_that_make_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for group, files in (
        ("frameworks", set(packages.FRAMEWORKS) - packages.APART),
        ("frameworks-apart", packages.APART),
    ):
        found = {re.match(r"[\w-]+", line)[0] for line in project["dependency-groups"][group]}
        # The Makefile installs torch first, with its index.
        assert found == {name for file in files for name in packages.names(file)} - {"torch"}
