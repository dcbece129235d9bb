"""Every code block of README and docs runs, or says why it cannot."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs import blocks
from programs import client

PAGES = blocks.pages()
PROGRAMS = [page for page in PAGES if page.is_program]
SHELL = [block for page in PAGES for block in page.of("bash")]
# Programs that were run: their output.
PRINTED: dict[tuple[object, ...], str] = {}
# Those of the developers' pages are of the code.
DIFFS = [block for page in PAGES if not page.name.startswith("docs/dev/") for block in page.of("diff")]


def run(
    start: Callable[..., subprocess.Popen[str]], command: list[str], page: blocks.Page, folder: Path
) -> str:
    """Runs it where the page's files are, with this Python first, and returns what it prints."""
    for name, text in page.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOADER_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    process = start(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, f"{page.name}: {printed}"
    return printed


def missing_imports(program: str) -> list[str]:
    """Packages that a program imports and that are not there."""
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@pytest.mark.limit(320)
@pytest.mark.parametrize("page", PROGRAMS, ids=[page.name for page in PROGRAMS])
def test_python_blocks_run(page, tmp_path):
    program = "\n".join(page.program) + "\n"
    own = {Path(name).parts[0].removesuffix(".py") for name in page.files}
    missing = [name for name in missing_imports(program) if name not in own]
    if missing:
        # `make frameworks` has them.
        pytest.skip(f"there is no {', '.join(missing)} here")
    # Of pages that say the same, one is run.
    same = (ast.dump(ast.parse(program)), *page.files.items())
    if same not in PRINTED:
        # Lines are the page's, so a traceback names the line of the document.
        (tmp_path / "page.py").write_text(program)
        PRINTED[same] = run(client.start, ["page.py"], page, tmp_path)
    printed = PRINTED[same]
    for block in page.of("text"):
        if block.is_output:
            assert block.code in printed, f"{block.where}: the page prints {printed}"


@pytest.mark.limit(320)
@pytest.mark.parametrize("block", SHELL, ids=[block.where for block in SHELL])
def test_shell_blocks_run(block, tmp_path):
    targets = set(re.findall(r"^([\w-]+):", (blocks.ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"^make ([\w-]+)", block.code, re.M):
        assert target in targets, f"{block.where}: there is no make {target}"
    if block.reason is not None:
        assert block.reason in blocks.REASONS, f"{block.where}: not a reason: {block.reason}"
        return
    run(subprocess.Popen, ["bash", "-euo", "pipefail", "-c", block.code], block.page, tmp_path)


@pytest.mark.parametrize("block", DIFFS, ids=[block.where for block in DIFFS])
def test_diffs_lead_from_torchs_class_to_ours(block):
    kinds = {}
    for line in block.code.splitlines():
        names = {}
        exec(line[1:], names)
        kinds[line[0]] = names["DataLoader"].__module__.split(".")[0]
    assert kinds == {"-": "torch", "+": "ringloader"}


def test_every_block_is_of_a_kind_that_is_tested():
    found = [block for page in PAGES for block in page.blocks]
    assert len(found) > 30
    assert [block.where for block in found if block.language not in blocks.LANGUAGES] == []
    # A reason must not hide Python.
    assert [block.where for block in found if block.reason and block.language != "bash"] == []


def test_a_comment_that_is_none_of_ours_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("<!-- no run -->\n```bash\nfalse\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks.read(tmp_path / "page.md")


def test_a_program_has_the_lines_of_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    text = (
        "# A\n<!-- hidden\na = 1\n-->\n\n```python\nb = a\n```\n\n```text\nc\n```\n\n```python\nd = b\n```\n"
    )
    (tmp_path / "page.md").write_text(text)
    page = blocks.read(tmp_path / "page.md")
    lines = text.splitlines()
    assert {line: lines[at] for at, line in enumerate(page.program) if line} == {
        line: line for line in ("a = 1", "b = a", "d = b")
    }
