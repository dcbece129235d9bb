"""What is published is of one version, and no release has placeholders or links that lead nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from ci import check_dist

import ringloader

pytestmark = pytest.mark.rings_only

PROJECT = tomllib.loads((check_dist.ROOT / "pyproject.toml").read_text())["project"]
PLACEHOLDERS = PROJECT["urls"]
FILLED = {name: f"https://example.org/{name.lower()}" for name in PLACEHOLDERS}
DESCRIPTION = (check_dist.ROOT / PROJECT["readme"]).read_text()


def metadata(version: str, addresses: dict[str, str], description: str = DESCRIPTION) -> bytes:
    lines = [
        "Metadata-Version: 2.4",
        f"Version: {version}",
        "Requires-Python: >=3.11",
        "License-Expression: Apache-2.0",
        "Description-Content-Type: text/markdown",
        *(f"Project-URL: {name}, {address}" for name, address in addresses.items()),
    ]
    return "\n".join([*lines, "", description]).encode()


def check(version: str, addresses: dict[str, str], description: str = DESCRIPTION, **also: bool) -> None:
    check_dist.check_metadata(
        Path("a.whl"), metadata(version, addresses, description), version, also.get("release", False)
    )


def test_the_sources_have_one_version() -> None:
    version = check_dist.version_of_sources()
    assert ringloader.__version__ == version
    changelog = (check_dist.ROOT / "CHANGELOG.md").read_text()
    if version.partition(".dev")[1]:
        unreleased = changelog.split("## [Unreleased]")[1].split("\n## ")[0]
        assert f"`{version}`" in unreleased
    else:
        check_dist.check_release(version, changelog)


def test_the_command_says_the_version_and_imports_no_torch() -> None:
    program = """
        import atexit, runpy, sys
        atexit.register(lambda: print([name for name in ("torch", "numpy") if name in sys.modules]))
        runpy.run_module("ringloader", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), "--version"],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert done.stdout.splitlines() == [f"ringloader {ringloader.__version__}", "[]"]
    assert done.stderr == ""


def test_a_version_in_development_may_have_placeholders_and_is_no_release() -> None:
    check("0.3.0.dev0", PLACEHOLDERS)
    with pytest.raises(SystemExit, match=r"0\.3\.0\.dev0 is a version in development: no release"):
        check_dist.check_release("0.3.0.dev0", "## [0.3.0.dev0] - 2027-01-01")


def test_a_release_has_addresses() -> None:
    check("0.3.0", FILLED, release=True)
    with pytest.raises(SystemExit, match=r"placeholders in \[project.urls\] of pyproject.toml: \['Issues'\]"):
        check("0.3.0", FILLED | {"Issues": "https://issues.invalid/new"}, release=True)
    with pytest.raises(SystemExit, match="has the addresses"):
        check("0.3.0", {"Issues": FILLED["Issues"]}, release=True)


def test_a_release_stands_in_the_changelog() -> None:
    check_dist.check_release("0.3.0", "# Changelog\n\n## [0.3.0] - 2027-01-01\n")
    with pytest.raises(SystemExit, match=r"has no heading '## \[0.3.0\] - <date>'"):
        check_dist.check_release("0.3.0", "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-22\n")


@pytest.mark.parametrize(
    "link",
    [
        "[page](docs/page.md)",
        "![image](images/a.svg)",
        "[page]: docs/page.md",
        '<img src="a.svg">',
        "[x](../y#z)",
    ],
)
def test_a_description_has_no_links_to_files(link: str) -> None:
    kept = "[site](https://example.org) [here](#install) `[i](j)` <!-- output -->"
    check("0.3.0.dev0", PLACEHOLDERS, kept)
    with pytest.raises(SystemExit, match=r"the description of a\.whl has links to files"):
        check("0.3.0.dev0", PLACEHOLDERS, f"{kept}\n\n{link}\n")


def test_placeholders_stand_in_one_place() -> None:
    files = [path for path in check_dist.ROOT.iterdir() if path.suffix in (".md", ".toml", ".yml")]
    files += [*(check_dist.ROOT / "docs").rglob("*.md"), *(check_dist.ROOT / "rust").glob("*/Cargo.toml")]
    named = {path.name for path in files if re.search(r"//\w+\.invalid\b", path.read_text())}
    assert named == {"pyproject.toml"} or not any(map(check_dist.is_placeholder, PLACEHOLDERS.values()))
