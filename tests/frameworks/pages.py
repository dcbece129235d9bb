"""The versions that docs/frameworks names: what a run found, and what the pages say."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from frameworks import packages

FOLDER = Path(__file__).resolve().parents[2] / "docs/frameworks"
_INDEX = FOLDER / "README.md"
_ROW = r"(?m)^(\| \[[^]]+\]\({file}\.md\) \| )([^|]*)( \|)"
_LINE = r"(?m)^Tested with .*\.$"
_BASE = r"with torch \S+ and CPython \S+\.$"


def base() -> str:
    return f"with torch {packages.version('torch')} and CPython {platform.python_version()}."


def line(file: str) -> str:
    """Returns what a page says of the versions it was tested with."""
    found = dict.fromkeys((*packages.names(file), "torch"))
    return f"Tested with {', '.join(f'{name} {packages.version(name)}' for name in found)}."


def named() -> dict[str, str]:
    """The version in each row of the table."""
    index = _INDEX.read_text()
    return {file: _row(file, index).group(2) for file in packages.FRAMEWORKS}


def write(files: list[str]) -> None:
    """Writes the installed versions of `files` into the table and their pages."""
    index = re.sub(_BASE, base(), _INDEX.read_text(), count=1, flags=re.MULTILINE)
    for file in files:
        version = str(packages.version(packages.FRAMEWORKS[file]))
        index = re.sub(_ROW.format(file=file), rf"\g<1>{version}\g<3>", index)
        page = FOLDER / f"{file}.md"
        page.write_text(re.sub(_LINE, line(file), page.read_text(), count=1))
    _INDEX.write_text(index)


def _row(file: str, index: str) -> re.Match[str]:
    found = re.search(_ROW.format(file=file), index)
    assert found, f"{_INDEX} has no row for {file}"
    return found
