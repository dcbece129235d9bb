"""Every framework that is tested has its page, its row and its package, and no other is named."""

import re
import tomllib

from frameworks import packages, pages

ROOT = pages.FOLDER.parents[1]


def test_each_framework_has_tests_a_page_and_a_row():
    files = set(packages.FRAMEWORKS)
    assert {path.stem for path in pages.FOLDER.glob("*.md")} == files | {"README"}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/frameworks").glob("test_*.py")}
    # The report at exit is about several of them.
    assert tests - {"reports"} == files
    index = (pages.FOLDER / "README.md").read_text()
    assert re.search(pages._BASE, index, re.M)
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == files
    assert set(pages.named()) == files


def test_table_and_page_name_one_version():
    for file, version in pages.named().items():
        page = (pages.FOLDER / f"{file}.md").read_text()
        (said,) = re.findall(r"^Tested with (.*)\.$", page, re.M)
        assert f"{packages.FRAMEWORKS[file]} {version}" in said.split(", "), file


def test_the_packages_are_those_that_make_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for group, files in (
        ("frameworks", set(packages.FRAMEWORKS) - packages.APART),
        ("frameworks-apart", packages.APART),
    ):
        found = {re.match(r"[\w-]+", line)[0] for line in project["dependency-groups"][group]}
        # The Makefile installs torch first, with its index.
        assert found == {name for file in files for name in packages.names(file)} - {"torch"}
