"""Counts of the house: lines of code, and the files that run in a journey."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

from programs import client

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_lines(text: str) -> int:
    """Returns the lines of Python code without blank ones, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def total(paths: Iterable[Path]) -> int:
    """Returns the lines of code of Python files."""
    return sum(python_lines(path.read_text()) for path in paths)


# A comment, a string or a character: what a brace in it means is no matter of Rust's grammar.
_RUST_TEXT = re.compile(
    r"//[^\n]*|/\*.*?\*/|\br(?P<hashes>#*)\".*?\"(?P=hashes)|\"(?:\\.|[^\"\\])*\"|'(?:\\[^']+|[^'\\])'",
    re.DOTALL,
)
_RUST_TEST = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]")


def rust_code(text: str) -> str:
    """Returns Rust code without comments, the text of strings, and what only tests build."""
    text = _RUST_TEXT.sub(lambda found: _blank(found[0]), text)
    while found := _RUST_TEST.search(text):
        text = text[: found.start()] + text[_end_of_item(text, found.end()) :]
    return text


def rust_lines(text: str) -> int:
    """Returns the lines of Rust code without blank ones, comments and what only tests build."""
    return sum(bool(line.strip()) for line in rust_code(text).splitlines())


def _blank(part: str) -> str:
    """Returns a comment's lines without text, and those of a string with other text."""
    keeps = "" if part.startswith(("//", "/*")) else "s"
    return "".join(character if character == "\n" else keeps for character in part)


def _end_of_item(text: str, at: int) -> int:
    """Returns the end of the Rust item that begins at a place: its semicolon, or its closing brace."""
    depth = 0
    for at in range(at, len(text)):  # noqa: B020
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] in ";}":
            return at + 1
    return len(text)


def rust_files(*folders: Path) -> list[Path]:
    """Returns the files of Rust below some folders, without those that only tests build."""
    found = [path for folder in folders for path in sorted(folder.rglob("*.rs"))]
    return [path for path in found if path.name != "tests.rs" and "tests" not in path.parts]


# Counts in the main process and in forked workers. Imports, which come before, do not count.
_PROGRAM = """
import json, os, signal, sys, threading
import torch, ringloader
from multiprocessing import util

ROOT = os.path.dirname(ringloader.__file__) + os.sep
NAME, OUT = sys.argv[1:]
ran = set()


def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "<module>":
        ran.add(code.co_filename[len(ROOT):])


def write():
    with open(os.path.join(OUT, f"{os.getpid()}.json"), "w") as file:
        json.dump(sorted(ran), file)


def write_at_end(worker):
    util.Finalize(None, write, exitpriority=100)


class Samples(torch.utils.data.Dataset):
    def __init__(self, bad=None, deadly=None):
        self.bad, self.deadly = bad, deadly

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("bad")
        died = os.path.join(OUT, "died")
        if index == self.deadly and not os.path.exists(died):
            open(died, "w").close()
            write()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index)


def loader_of(cls=ringloader.DataLoader, dataset=None, **options):
    return cls(
        dataset or Samples(), batch_size=4, num_workers=2, shuffle=True,
        worker_init_fn=write_at_end, multiprocessing_context="fork", **options,
    )


def plain():
    return sum(map(len, loader_of())) == 64


def on_error():
    loader = loader_of(dataset=Samples(bad=7), on_error="skip")
    return sum(map(len, loader)) == 63 and len(loader.errors) == 1


def state():
    loader, again = (loader_of(ringloader.StatefulDataLoader) for _ in range(2))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    again.load_state_dict(loader.state_dict())
    return [batch.tolist() for batch in iterator] == [batch.tolist() for batch in again]


def lost():
    return sum(map(len, loader_of(dataset=Samples(deadly=30), restart_workers=1))) == 64


def stats():
    loader = loader_of(stats=True)
    return sum(map(len, loader)) == 64 and bool(str(loader.epoch_stats()))


journey = globals()[NAME]
assert journey()
for name in os.listdir(OUT):
    os.remove(os.path.join(OUT, name))
threading.setprofile(note)
sys.setprofile(note)
assert journey()
sys.setprofile(None)
threading.setprofile(None)
write()
"""


def files_of_journey(name: str, folder: Path) -> set[str]:
    """Returns the files of the package, by their paths in it, whose code runs in a journey."""
    out = folder / "ran"
    out.mkdir()
    program = folder / "journey.py"
    program.write_text(_PROGRAM)
    ended = client.run(
        [str(program), name, str(out)], timeout=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(path.read_text()) for path in out.glob("*.json")]
    # The main process and both workers, at least.
    assert len(found) >= 3
    return {file for files in found for file in files}
