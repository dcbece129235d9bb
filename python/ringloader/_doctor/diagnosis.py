"""The findings of ``doctor()``, and the words in which they are said."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Literal

Verdict = Literal["ok", "note", "problem"]

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check of ``doctor()``.

    Attributes:
        subject: The name of the check, as ``"open files"``.
        value: The result, as text.
        verdict: ``"ok"``; ``"note"``: worth knowing; ``"problem"``: loaders fail, or leave the native path.
        meaning: The consequence, and what to change; empty if there is none.
    """

    subject: str
    value: str
    verdict: Verdict = "ok"
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of ``ringloader.doctor()``. ``print`` it, and paste it into a bug report.

    Attributes:
        findings: In the order in which they are printed.
    """

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings by which loaders fail, or leave the native path."""
        return tuple(one for one in self.findings if one.verdict == "problem")

    def __str__(self) -> str:
        widest = max((len(one.subject) for one in self.findings), default=0)
        return "\n".join(line for one in self.findings for line in _lines(one, widest))


def _lines(finding: Finding, widest: int) -> Iterator[str]:
    mark = "" if finding.verdict == "ok" else f"{finding.verdict}: "
    yield f"{finding.subject:<{widest}}  {finding.value}"
    if finding.meaning:
        indent = " " * (widest + 2)
        yield from textwrap.wrap(
            mark + finding.meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent
        )
