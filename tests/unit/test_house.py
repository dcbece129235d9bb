"""The sizes of the house, which go down, not up. A change that needs more says why in its message."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

import pytest
import test_layers

from ringloader._features.table import TABLE
from unit import house_parts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/ringloader"
CORE, BINDING = ROOT / "rust/core/src", ROOT / "rust/py/src"

# Code lines are without blank ones, comments and docstrings; the package's are without the stub.
GUARDS = {
    "lines of the package": 17_569,
    "modules of the package": 160,
    "lines of the core": 4_208,
    "lines of `_features/state`": 1_420,
    "lines of another feature": 890,
    "pairs of features": 4,
    "modules in one folder": 11,
    "lines of Rust": 22_406,
    "files of the binding": 74,
    "lines that make code at run time": 2,
}

# The options that a module of the core names, by module. The list shrinks.
NAMED = {
    # The sampler's own attribute.
    "_sources/rollover": {"last_batch"},
    "_start/fallback": {"worker_method"},
}
# torch has a device and seeds too, and the core divides the memory.
THE_CORES = {"device", "seed", "max_shared_bytes"}

# Parts of names that are of features. Rust's plain files have none: what a feature has lies in its module.
WORDS = {
    *("joint", "shares", "claim", "claims", "claimed", "runs", "balance", "varies", "varying", "following"),
    *("follower", "early", "relayed", "successor", "succeed", "resume", "watched", "ledger"),
    *("recorder", "recording", "clocks", "stamps", "timed"),
}
PLAIN_RUST = [
    *(CORE / "scheduler" / name for name in ("mod.rs", "epochs.rs", "lost.rs", "poll.rs")),
    *(CORE / "transport" / name for name in ("interface.rs", "engine.rs", "queues.rs")),
    *(CORE / "transport/engine" / name for name in ("channel.rs", "results.rs", "tasks.rs", "workers.rs")),
    *(CORE / "transport/queues" / name for name in ("state.rs", "transport.rs")),
    *(BINDING / "scheduler" / name for name in ("mod.rs", "advance.rs", "parent_end.rs")),
    *(BINDING / "transport" / name for name in ("engine.rs", "queues.rs")),
]
# Those that are named all the same: at hooks. The list shrinks.
NAMED_IN_RUST = {
    "core/scheduler/mod": {"early"},
    "core/scheduler/lost": {"early"},
    "core/scheduler/poll": {"early"},
    "core/transport/interface": {"joint"},
    "core/transport/engine": {"joint", "relayed"},
    "core/transport/queues": {"joint"},
    "core/transport/engine/channel": {"relayed"},
    "core/transport/engine/results": {"joint"},
    "core/transport/queues/state": {"joint"},
    "core/transport/queues/transport": {"joint"},
    "py/scheduler/mod": {"early", "joint", "recording", "timed"},
    "py/scheduler/advance": {"early", "timed", "watched"},
    "py/scheduler/parent_end": {"claimed", "joint"},
    "py/transport/engine": {"succeed"},
    "py/transport/queues": {"claimed", "clocks"},
}

# Files of the package whose code runs in one epoch, and those that a feature adds to a plain one.
PLAIN = 32
MORE = {"on_error": 8, "state": 8, "lost": 9, "stats": 8}


def measured() -> dict[str, int]:
    """Returns the present size of what each guard names."""
    modules = sorted(PACKAGE.rglob("*.py"))
    folders = collections.Counter(path.parent for path in modules if path.name != "__init__.py")
    rust = house_parts.rust_files(CORE, BINDING)
    features = {path.name: lines_of(path) for path in (PACKAGE / "_features").iterdir() if path.is_dir()}
    return {
        "lines of the package": house_parts.total(modules),
        "modules of the package": len(modules),
        "lines of the core": sum(lines_of(PACKAGE / room) for room in test_layers.CORE_ROOMS),
        "lines of `_features/state`": features.pop("state"),
        "lines of another feature": max(features.values()),
        "pairs of features": len(test_layers.PAIRS),
        "modules in one folder": max(folders.values()),
        "lines of Rust": sum(house_parts.rust_lines(path.read_text()) for path in rust),
        "files of the binding": len(house_parts.rust_files(BINDING)),
        "lines that make code at run time": sum(map(made_at_run_time, modules)),
    }


def lines_of(folder: Path) -> int:
    """Returns the lines of code of a folder of the package."""
    return house_parts.total(sorted(folder.glob("*.py")))


def made_at_run_time(path: Path) -> int:
    """Returns how many lines of a module call ``exec``, or set ``__code__`` or ``__class__``."""
    lines = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exec":
            lines.add(node.lineno)
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
            lines.update(target.lineno for target in targets if target.attr in ("__code__", "__class__"))
    return len(lines)


def test_no_size_is_above_its_guard() -> None:
    found = measured()
    assert found.keys() == GUARDS.keys()
    assert {name: size for name, size in found.items() if size > GUARDS[name]} == {}


def test_counts_leave_out_what_is_no_code() -> None:
    text = '"""Page."""\n\n# Why.\nX = """\ntext\n"""\n\n\ndef f():\n    "Returns."\n    return X  # Here.\n'
    assert house_parts.python_lines(text) == 5
    rust = "// {\nfn f() {\n    g(\"// }\", '{'); /* one\n two */\n}\n\nfn h() {}\n"
    rust += "#[cfg(test)]\nmod tests {\n    fn t() { }\n}\n"
    assert house_parts.rust_lines(rust) == 4


def named_in(text: str, names: set[str]) -> set[str]:
    """Returns which names code has, as attributes, arguments, variables or words of strings."""
    nodes = list(ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    with_docstrings = [node for node in nodes if isinstance(node, documented) and ast.get_docstring(node)]
    docstrings = {id(node.body[0].value) for node in with_docstrings}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.update(re.findall(r"\w+", node.value))
        found |= {getattr(node, name, None) for name in ("id", "attr", "arg", "name")}
    return {name.strip("_") for name in found if name is not None} & names


def test_names_are_found_wherever_code_has_them() -> None:
    names = {"a", "b", "c", "d", "e", "f"}
    text = 'def g(a, *, h=1):\n    "Returns b."\n    d = x._c  # f\n    return g(e=1, h=f"{x} of b")\n'
    assert named_in(text, names) == {"a", "b", "c", "d", "e"}
    assert named_in('def g():\n    "Returns a."\n    return [b]\n', names) == {"b"}


def test_the_core_names_no_option_but_what_is_listed() -> None:
    options = {name for name, about in TABLE.items() if not about.is_torchs} - THE_CORES
    assert len(options) > 15
    files = [file for room in test_layers.CORE_ROOMS for file in (PACKAGE / room).glob("*.py")]
    assert len(files) > 50
    found = {
        str(file.relative_to(PACKAGE).with_suffix("")): named_in(file.read_text(), options) for file in files
    }
    assert {module: names for module, names in found.items() if names} == NAMED


def words_of_rust(text: str) -> set[str]:
    """Returns the words that names have in Rust code, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", house_parts.rust_code(text))}


def test_words_of_rust_are_parts_of_names() -> None:
    assert words_of_rust("fn take_early(x: PollLate) {} // joint") == {
        "fn",
        "take",
        "early",
        "x",
        "poll",
        "late",
    }


def test_plain_files_of_rust_name_no_feature_but_what_is_listed() -> None:
    found = {
        str(file.relative_to(ROOT / "rust").with_suffix("")).replace("/src", ""): (
            words_of_rust(file.read_text()) & WORDS
        )
        for file in PLAIN_RUST
    }
    assert {file: words for file, words in found.items() if words} == NAMED_IN_RUST


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return house_parts.files_of_journey("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.rings_only
def test_a_plain_loop_runs_few_files(plain: set[str]) -> None:
    assert "_worker/loop.py" in plain
    assert len(plain) <= PLAIN, sorted(plain)
    assert not [name for name in plain if re.match("_features/.+/", name)], "no feature is on"


@pytest.mark.rings_only
@pytest.mark.parametrize("name", MORE)
def test_a_feature_adds_few_files(name: str, plain: set[str], tmp_path: Path) -> None:
    files = house_parts.files_of_journey(name, tmp_path)
    assert 0 < len(files) - len(plain) <= MORE[name], sorted(files - plain)
