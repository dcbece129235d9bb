"""Names, messages and figures in the documents are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benches.python import chart

import ringloader
from docs import blocks
from ringloader._features.table import TABLE

ROOT = blocks.ROOT
DOCS = ROOT / "docs"
# Of code, by docs/assets/site.css.
COLUMN = 88
SOURCES = {".py", ".pyi", ".rs", ".sh", ".pth"}


def sources(*folders: str) -> Iterable[str]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SOURCES:
                yield file.read_text()


def test_every_option_and_variable_has_a_place() -> None:
    code = "\n".join(sources("python", "extras", "rust", "ci", "benches"))
    known = set(re.findall(r"\bRINGLOADER_[A-Z_]+\b", code)) | {"RINGLOADER", "LOCAL_WORLD_SIZE", *TABLE}
    # The Python tests' own, which is read by no code.
    known |= set(
        re.findall(r'"((?:MALLOC|GLIBC)_[A-Z_]+)"', (ROOT / "python/ringloader/_worker/entry.py").read_text())
    )
    page = (DOCS / "options.md").read_text()
    named = re.findall(r"^###+ (`.*)|^- \*\*Variables:\*\* (.*\n(?:  .*\n)*)", page, re.M)
    mine = set(re.findall(r"`(\w+)`", " ".join(map("".join, named))))
    # Users need not read about those of the tests.
    tests = set(re.findall(r"^\| `(RINGLOADER_\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    assert not mine & tests
    assert mine | tests == known


def test_every_public_name_is_in_the_reference() -> None:
    pages = [page.read_text() for page in sorted((DOCS / "api").glob("*.md"))]
    named = [name for page in pages for name in re.findall(r"^::: ringloader\.(\w+)$", page, re.M)]
    assert sorted(named) == sorted(ringloader.__all__)


def test_the_list_of_the_reference_has_the_names_of_its_pages() -> None:
    listed = re.findall(r"^\| \[.*?\]\((\w+\.md)\) \| (.*) \|$", (DOCS / "api/README.md").read_text(), re.M)
    assert len(listed) > 5
    for page, names in listed:
        named = re.findall(r"^::: ringloader\.([\w.]+)$", (DOCS / "api" / page).read_text(), re.M)
        assert not named or named == re.findall(r"`([^`]+)`", names), page


def joined(code: str) -> str:
    """Source text with strings that go on in the next line made one."""
    code = re.sub(r'"\s*\n\s*(?:\+ )?[rf]?"', "", code)
    return re.sub(r"\\\n\s*", "", code)


def test_every_message_stands_in_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    code = joined("\n".join(sources("python", "rust/core/src", "rust/py/src", "extras")))
    paths = page.split("## The report names another path")[1].split("## By message")[0]
    messages = page.split("## By message")[1].split("## Still stuck")[0]
    found = re.findall(r"^\| `\w+` \| `(.*?)` \|", paths, re.M) + re.findall(r"^\| `(.*?)`", messages, re.M)
    assert len(found) > 20
    parts = [part for message in found for part in re.split(r"\s*…\s*", message) if len(part) > 1]
    # A format of the logger's, of Python's or of Rust's stands where the page has dots.
    assert [part for part in parts if part not in code] == []


def test_pictures_are_drawn_from_the_tables() -> None:
    drawn = chart.pictures(chart.PAGE.read_text())
    assert {path.name: path.read_text() for path in chart.IMAGES.iterdir()} == drawn, (
        "python -m benches.python.chart"
    )


def test_the_figures_of_the_readme_are_those_of_the_table() -> None:
    table = chart.rows(chart.PAGE.read_text(), "program | torch without workers")
    assert len(table) == 5
    # A ratio whose range includes 1 is not bold, and says nothing to a reader.
    clear = [row for row in table if row[-1].startswith("**")]
    assert chart.rows((ROOT / "README.md").read_text(), "program | torch, 0 workers") == clear


def test_the_readme_fits_a_reader() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_users_have_few_pages() -> None:
    pages = [page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "dev")]
    assert len(pages) <= 55
    assert sum(len(page.read_text().split()) for page in pages) <= 45_000


def test_figures_of_fault_injection_are_those_of_its_page() -> None:
    page = (DOCS / "chaos.md").read_text()
    ours = re.search(r"^ringloader: (\d+) cases: (\d+) ok, (\d+) known$", page, re.M)
    torchs = re.search(r"^torch: \d+ cases: (\d+) ok, .* (\d+) hang$", page, re.M)
    assert ours and torchs
    cases, passed, known = ours.groups()
    assert f"{cases} small programs go wrong" in page
    assert (
        f"passes {passed} of them and fails {known} in known ways; torch's loader passes {torchs[1]}." in page
    )
    evidence = (DOCS / "guides/production.md").read_text()
    assert (
        f"| {cases} programs that go wrong: ringloader passes {passed} and fails {known} in known ways; "
        in evidence
    )
    assert f"torch passes {torchs[1]} and hangs in {torchs[2]} |" in evidence
    assert f"{cases} programs" in (ROOT / "README.md").read_text()


def test_links_between_files_lead_to_something() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "python").rglob("*.md")]
    pages += [ROOT / "benches/README.md", ROOT / "tests/README.md"]
    broken = []
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target:
                broken += [] if (page.parent / target).exists() else [f"{page.name}: {target}"]
    assert broken == []


def test_lines_of_code_fit_the_column_of_the_site() -> None:
    # A diff of developers' pages has the lines of the sources.
    pages = [page for page in blocks.pages() if not page.name.startswith("docs/dev/")]
    code = [block for page in pages for block in page.blocks if block.language != "text"]
    long = [
        f"{block.where}: {line}" for block in code for line in block.code.splitlines() if len(line) > COLUMN
    ]
    assert long == []


def test_one_batch_is_followed_over_at_most_eight_files() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.split("## One batch, followed")[1].split("\n## ")[0]
    followed = re.findall(r"^\d+\. `(.*?)`", section, re.M)
    assert 0 < len(followed) <= 8
    assert [name for name in followed if not (ROOT / name).is_file()] == []


def test_files_that_developers_pages_name_are_there() -> None:
    roots = [
        ROOT / name
        for name in ("", "python", "python/ringloader", "rust", "rust/core/src", "rust/core/tests")
    ]
    roots += [ROOT / "rust/py/src", ROOT / "tests", ROOT / "tests/parity", ROOT / "rust/core/src/transport"]
    pages = [ROOT / "ARCHITECTURE.md", ROOT / "tests/README.md", *(DOCS / "dev").rglob("*.md")]
    pages += (ROOT / "python").rglob("README.md")
    named, missing = set(), []
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        names = {
            name for name in re.findall(r"`([\w./*-]+)`", text) if re.search(r"\.(py|rs|sh|yml)$|/$", name)
        }
        named |= names
        missing += [
            f"{page.relative_to(ROOT)}: {name}"
            for name in names
            if not any(list(root.glob(name)) for root in [*roots, page.parent])
        ]
    assert len(named) > 150
    assert missing == []


def test_tests_that_a_page_names_are_there() -> None:
    missing = []
    for page in sorted(DOCS.rglob("*.md")):
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
            path = ROOT / file
            if not path.is_file() or (name and f"def {name}(" not in path.read_text()):
                missing.append(f"{page.name}: {file}::{name}")
    assert missing == []


def test_the_glossary_stays_short() -> None:
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (DOCS / "dev/glossary.md").read_text(), re.M)[1:]
    assert 20 < len(words) <= 30
    assert len(set(words)) == len(words)
    assert words == sorted(words)
