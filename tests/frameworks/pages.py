"""The versions in the table of docs/frameworks: what a run found, and what the table says."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from frameworks import packages

FOLDER = Path(__file__).resolve().parents[2] / "docs/frameworks"
INDEX = FOLDER / "README.md"
# The second column of a row names distributions with their versions.
_VERSION = r"(?m)^(\| [^|\n]+ \| (?:[^|\n]+, )?{name} )([\w.]+)"
_BASE = r"with torch \S+ and CPython \S+\.$"


def base() -> str:
    return f"with torch {packages.version('torch')} and CPython {platform.python_version()}."


def named() -> dict[str, str]:
    """The version in the row of each framework."""
    index = INDEX.read_text()
    return {file: _version(name, index) for file, name in packages.FRAMEWORKS.items()}


def write(files: list[str]) -> None:
    """Writes the installed versions of `files` into the table."""
    index, count = re.subn(_BASE, base(), INDEX.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    for name in (name for file in files for name in packages.names(file)):
        _version(name, index)
        index = re.sub(_VERSION.format(name=name), rf"\g<1>{packages.version(name)}", index)
    INDEX.write_text(index)


def _version(name: str, index: str) -> str:
    found = re.findall(_VERSION.format(name=re.escape(name)), index)
    assert len(found) == 1, f"{INDEX} has {len(found)} rows for {name}"
    return str(found[0][1])
