"""The code blocks of the documents, and what runs them.

A page's Python blocks are one program, in order. What a reader need not see is in comments of the page:

``<!-- hidden`` ... ``-->``             Python before the next block.
``<!-- file train.py`` ... ``-->``      a file that the page's blocks find.
``<!-- no-run: REASON -->``             the next block is not run; the reason is one of `REASONS`.
``<!-- output -->``                     the next block, in the language text, is part of what the page prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LANGUAGES = {"python", "bash", "diff", "text"}

# Why a block may stay out.
REASONS = {
    "installs packages",
    "needs a checkout, and minutes",
}

_BLOCK = re.compile(
    r"^<!-- (?P<comment>\S[^\n]*?)(?: -->$|\n(?P<body>.*?)^-->$)"
    r"|^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass
class Block:
    """One fenced block."""

    page: Page
    line: int
    language: str
    code: str
    reason: str | None = None
    is_output: bool = False

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Page:
    """A document."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    # Lines of the program, at the lines of the page.
    program: list[str] = field(default_factory=list)

    def of(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]

    @property
    def is_program(self) -> bool:
        return any(self.program)


def pages() -> list[Page]:
    """Every document that a user reads."""
    roots = [
        ROOT / name
        for name in ("README.md", "DESCRIPTION.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
    ]
    found = [*roots, ROOT / "benches/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [read(path) for path in found]


def read(path: Path) -> Page:
    text = path.read_text()
    page = Page(str(path.relative_to(ROOT)))
    reason, is_output = None, False
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        comment = found["comment"]
        if comment is None:
            # The whole info string: a block without a language, or with more than one, is seen.
            block = Block(page, line, found["language"], _dedented(found), reason, is_output)
            page.blocks.append(block)
            if block.language == "python" and reason is None:
                _put(page, line, block.code)
            reason, is_output = None, False
        elif comment == "hidden":
            _put(page, line, found["body"])
        elif comment.startswith("file "):
            page.files[comment.removeprefix("file ")] = found["body"]
        elif comment.startswith("no-run: "):
            reason = comment.removeprefix("no-run: ")
        elif comment == "output":
            is_output = True
        else:
            raise ValueError(f"{page.name}:{line - 1}: a comment that is none of ours: {comment}")
    return page


def _dedented(found: re.Match[str]) -> str:
    return re.sub(rf"^{found['indent']}", "", found["code"], flags=re.M)


def _put(page: Page, line: int, code: str) -> None:
    lines = code.splitlines()
    page.program += [""] * (line - 1 + len(lines) - len(page.program))
    page.program[line - 1 : line - 1 + len(lines)] = lines
