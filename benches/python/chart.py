"""Draws the pictures of docs/benchmarks.md from its tables: `python -m benches.python.chart`.

SVG by hand, so that the same table gives the same bytes; tests/docs checks that.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/benchmarks.md"
IMAGES = ROOT / "docs/images"

OURS, TORCHS, INK, LINES = "#1f6fb4", "#a9a9a9", "#222222", "#dddddd"
WIDTH, LABELS, ROW, TOP = 960, 480, 26, 40
BARS = WIDTH - LABELS - 70
# A ratio at the start of a cell; bold where its range does not include 1.
RATIO = re.compile(r"\**([\d,.]+)")


def rows(page: str, first_cell: str) -> list[list[str]]:
    """The cells of the table whose head begins with `first_cell`."""
    head = page.index(f"| {first_cell}")
    table = page[head:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


def number(text: str) -> float:
    """The first number in a cell."""
    found = re.search(r"[\d,.]*\d", text)
    assert found, text
    return float(found[0].replace(",", ""))


class Chart:
    """Horizontal bars over a logarithmic axis."""

    def __init__(self, title: str, axis: str, lowest: float, highest: float, groups: int, bars: int) -> None:
        self._lowest = math.log10(lowest)
        self._span = math.log10(highest) - self._lowest
        self._step = ROW if bars == 1 else 10 + 16 * bars
        self._height = TOP + groups * self._step + 46
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{self._height}" fill="white"/>',
        ]
        self._text(12, 22, title, weight="bold", size=14)
        bottom = TOP + groups * self._step + 6
        for power in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1):
            x = self._x(10.0**power)
            self._parts.append(
                f'<line x1="{x}" x2="{x}" y1="{TOP - 4}" y2="{bottom}" stroke="{LINES if power else INK}"/>'
            )
            self._text(x, bottom + 15, f"{10**power:,}", anchor="middle")
        self._text(LABELS + BARS / 2, bottom + 32, axis, anchor="middle")

    def _x(self, value: float) -> float:
        return round(LABELS + BARS * (math.log10(value) - self._lowest) / self._span, 1)

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        weight: str = "normal",
        size: int = 12,
        colour: str = INK,
    ) -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
            f' fill="{colour}">{escape(text)}</text>'
        )

    def group(self, place: int, label: str, bars: list[tuple[float, str, str]]) -> None:
        """One row: its label, and for each bar the value, what stands beside it, and its colour."""
        top = TOP + place * self._step
        self._text(LABELS - 8, top + self._step / 2 + 4, label, anchor="end")
        thick = 16 if len(bars) > 1 else 18
        for at, (value, text, colour) in enumerate(bars):
            y = top + 4 + at * thick
            start, end = LABELS, self._x(value)
            self._parts.append(
                f'<rect x="{start}" y="{y}" width="{round(max(end - start, 1), 1)}" height="{thick - 3}"'
                f' fill="{colour}"/>'
            )
            self._text(max(end, start) + 5, y + thick - 6, text, size=11)

    def legend(self, entries: list[tuple[str, str]]) -> None:
        """Says what the colours stand for."""
        for at, (text, colour) in enumerate(entries):
            x = WIDTH - 220 + at * 90
            self._parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>')
            self._text(x + 17, 22, text)

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def throughput(page: str) -> str:
    """Every row of the table of loaders."""
    found = rows(page, "workload (2 workers)")
    chart = Chart(
        "ringloader's better rate, times torch's better rate",
        "log scale; 1 is the better of torch's loader with 0 and 2 workers",
        0.5,
        20,
        len(found),
        1,
    )
    for place, row in enumerate(found):
        ratio = RATIO.match(row[1])
        assert ratio, row
        chart.group(place, row[0], [(number(ratio[1]), ratio[1], OURS)])
    return chart.svg()


def programs(page: str) -> str:
    """The better of ringloader's rates over the better of torch's, for each program; the largest first."""
    found = rows(page, "program | torch without workers")
    ratios = {row[0].replace("`", ""): RATIO.match(row[5]) for row in found}
    texts = {label: ratio[1] for label, ratio in ratios.items() if ratio}
    assert len(texts) == len(found), ratios
    chart = Chart(
        "Programs: ringloader's better rate, times torch's better rate",
        "log scale; 1 is the better of torch's loader with 0 and 2 workers",
        0.5,
        20,
        len(found),
        1,
    )
    for place, (label, text) in enumerate(sorted(texts.items(), key=lambda item: -number(item[1]))):
        chart.group(place, label, [(number(text), text, OURS)])
    return chart.svg()


def starts(page: str) -> str:
    """The first batch of a process, in every row of the table of starts."""
    found = rows(page, "| first batch of a process")
    chart = Chart(
        "First batch of a process, in milliseconds: lower is better", "log scale", 10, 10_000, len(found), 2
    )
    chart.legend([("torch", TORCHS), ("ringloader", OURS)])
    for place, row in enumerate(found):
        torchs, ours = row[1].split(" (")[0].split(", ")
        chart.group(place, row[0], [(number(torchs), torchs, TORCHS), (number(ours), ours, OURS)])
    return chart.svg()


def pictures(page: str) -> dict[str, str]:
    """Name of each file, and what it holds."""
    return {"throughput.svg": throughput(page), "programs.svg": programs(page), "starts.svg": starts(page)}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures(PAGE.read_text()).items():
        (IMAGES / name).write_text(text)
