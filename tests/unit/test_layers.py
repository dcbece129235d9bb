"""Dependencies run one way: the table of ARCHITECTURE.md, kept."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "rust/core/src"
BINDING = ROOT / "rust/py/src"
PACKAGE = ROOT / "python/ringloader"

# Module of the core: modules that it may use. `transport::layout` is where pools and rings meet memory.
CORE_MAY_USE = {
    "error": set(),
    "cache": {"sync"},
    "bits": set(),
    "number": set(),
    "sync": {"bits", "error", "number"},
    "batch": {"error", "number"},
    "plan": {"bits", "error", "number"},
    "timing": {"number"},
    "ring": {"error", "number", "sync"},
    "pool": {"error", "number", "sync"},
    "forks": {"sync"},
    "joint": {"number", "sync"},
    "os": {"error", "number", "sync"},
    "items": {"error", "number", "os"},
    "samples": {"cache", "error", "number", "os", "process", "sync"},
    "process": {"error", "forks", "os", "sync"},
    "transport": {
        "error",
        "number",
        "sync",
        "forks",
        "joint",
        "os",
        "process",
        "ring",
        "pool",
        "batch",
        "timing",
    },
    "scheduler": {"error", "number", "plan", "transport"},
}

# Folder or file of the binding: those that it may use.
BINDING_MAY_USE = {
    "objects": set(),
    "strings": set(),
    "caught": {"objects"},
    "identity": set(),
    "timing": {"strings"},
    "gil": set(),
    "lock": {"gil"},
    "process": {"gil"},
    "python": {"caught", "strings"},
    "items": {"gil", "objects", "process"},
    "torch": {"gil", "identity", "python", "strings"},
    "sampling": {"gil", "lock", "python", "strings", "torch"},
    "batch": {"gil", "identity", "objects", "strings", "torch"},
    "cache": {"batch", "gil", "process", "torch"},
    "transport": {
        "batch",
        "caught",
        "gil",
        "process",
        "python",
        "sampling",
        "strings",
        "timing",
        "torch",
    },
    "placement": {"batch", "caught", "gil", "strings", "torch", "transport"},
    "scheduler": {
        "caught",
        "gil",
        "lock",
        "placement",
        "python",
        "sampling",
        "strings",
        "timing",
        "torch",
        "transport",
    },
    "collate": {"batch", "gil", "objects", "strings", "torch", "transport"},
}
# Places where the binding names modules of ours and private attributes, and private ones of torch's.
BINDING_NAMES = {"python.rs": r"_(?!_)|ringloader\.", "torch/names.rs": r"_(?!_)"}

# The rooms of the core: whoever wants to see a batch come reads these, and no feature.
CORE_ROOMS = {"_common", "_core", "_sources", "_start", "_torch", "_transport", "_worker"}
# Room of the package: those that it may use, function-local imports and names in strings too. A feature's
# folder is a room.
# `_native` is the extension: what it imports by name while it runs.
PYTHON_MAY_USE = {
    "__init__": {"_patch"},
    "__main__": {"_features.report", "_features.rules", "_features.table", "_log", "_patch", "_tools"},
    "_common": {"_native", "_torch"},
    "_core": {"_common", "_native", "_sources", "_start", "_torch", "_transport", "_worker"},
    "_data": {"_common", "_log", "_native", "_torch"},
    "_features.all": {
        "_core",
        "_data",
        "_features.arrays",
        "_features.auto",
        "_features.concurrency",
        "_features.device",
        "_features.devices",
        "_features.dispatch",
        "_features.joint",
        "_features.losses",
        "_features.main_prefetch",
        "_features.next_epoch",
        "_features.on_error",
        "_features.options",
        "_features.pools",
        "_features.report",
        "_features.rules",
        "_features.seeding",
        "_features.spawn_server",
        "_features.stats",
        "_features.table",
        "_features.threads",
        "_native",
        "_torch",
    },
    "_features.arrays": {"_core", "_data", "_native", "_torch", "_worker"},
    "_features.auto": {
        "_common",
        "_core",
        "_features.cores",
        "_features.options",
        "_features.rules",
        "_features.table",
        "_log",
        "_native",
        "_torch",
    },
    "_features.calls": {"_common", "_features.rules", "_torch", "_transport"},
    "_features.concurrency": {
        "_common",
        "_core",
        "_data",
        "_features.rules",
        "_features.shared_words",
        "_features.table",
        "_features.worker_info",
        "_log",
        "_torch",
        "_worker",
    },
    "_features.cores": set(),
    "_features.device": {
        "_common",
        "_core",
        "_features.devices",
        "_features.table",
        "_log",
        "_native",
        "_torch",
        "_transport",
        "_worker",
    },
    "_features.devices": {"_torch"},
    "_features.dispatch": {
        "_common",
        "_core",
        "_features.spawn_server",
        "_native",
        "_start",
        "_torch",
        "_worker",
    },
    "_features.joint": {"_core", "_features.table", "_log", "_native", "_torch", "_transport", "_worker"},
    "_features.losses": {
        "_common",
        "_core",
        "_features.shared_words",
        "_features.table",
        "_log",
        "_native",
        "_torch",
        "_transport",
        "_worker",
    },
    "_features.main_prefetch": {"_core", "_native", "_torch", "_transport"},
    "_features.next_epoch": {"_common", "_core", "_features.table", "_sources", "_torch"},
    "_features.on_error": {
        "_common",
        "_core",
        "_features.options",
        "_features.rules",
        "_features.table",
        "_log",
        "_torch",
        "_worker",
        "bad_samples",
    },
    "_features.options": {"_features.rules", "_sources", "_torch", "bad_samples"},
    "_features.pools": {
        "_core",
        "_features.rules",
        "_features.spawn_server",
        "_features.table",
        "_native",
        "_start",
        "_torch",
        "_transport",
        "_worker",
    },
    "_features.report": {"_common", "_core", "_log", "_torch"},
    "_features.rules": {"_core", "_torch", "_worker"},
    "_features.seeding": {
        "_common",
        "_core",
        "_features.rules",
        "_features.table",
        "_native",
        "_sources",
        "_torch",
        "_worker",
        "seeds",
    },
    "_features.shared_words": {"_common", "_native"},
    "_features.shutdown": {"_core", "_features.spawn_server", "_native", "_torch", "_transport"},
    "_features.spawn_server": {"_common", "_core", "_log", "_start", "_torch", "_worker"},
    "_features.state": {
        "_common",
        "_core",
        "_features.rules",
        "_features.table",
        "_log",
        "_native",
        "_sources",
        "_torch",
        "_worker",
    },
    "_features.stats": {
        "_common",
        "_core",
        "_features.cores",
        "_features.devices",
        "_features.rules",
        "_features.table",
        "_native",
        "_torch",
        "_worker",
    },
    "_features.table": {"_features.options", "_features.rules", "_torch", "bad_samples", "seeds"},
    "_features.threads": {
        "_common",
        "_core",
        "_features.rules",
        "_features.worker_info",
        "_log",
        "_native",
        "_torch",
        "_transport",
        "_worker",
    },
    "_features.worker_info": {"_torch"},
    "_log": set(),
    "_native": {"_common", "_torch", "_transport"},
    "_patch": {
        "_core",
        "_features.all",
        "_features.devices",
        "_features.pools",
        "_features.report",
        "_features.rules",
        "_features.table",
        "_log",
        "_native",
        "_torch",
        "bad_samples",
        "dataloader",
        "seeds",
        "stateful_dataloader",
    },
    "_ray": {
        "_common",
        "_core",
        "_features.pools",
        "_log",
        "_native",
        "_start",
        "_torch",
        "_transport",
        "_worker",
    },
    "_sources": {"_native", "_torch"},
    "_start": {"_common", "_log", "_native", "_torch", "_worker"},
    "_tools": {
        "_common",
        "_core",
        "_features.cores",
        "_features.on_error",
        "_features.report",
        "_features.rules",
        "_features.stats",
        "_features.table",
        "_log",
        "_native",
        "_patch",
        "_torch",
        "_transport",
        "_worker",
        "dataloader",
    },
    "_torch": {"_log", "_native"},
    "_transport": {"_common", "_log", "_native", "_start", "_torch", "_worker"},
    "_worker": {"_common", "_native", "_torch"},
    "bad_samples": set(),
    "batchify": {"_data"},
    "dataloader": {
        "_core",
        "_features.all",
        "_features.calls",
        "_features.on_error",
        "_features.options",
        "_features.pools",
        "_features.report",
        "_features.shutdown",
        "_features.stats",
        "_features.table",
        "_torch",
        "bad_samples",
        "seeds",
    },
    "ray": {"_core", "_features.pools", "_native", "_ray", "_torch"},
    "seeds": set(),
    "stateful_dataloader": {
        "_features.pools",
        "_features.state",
        "_features.table",
        "_native",
        "bad_samples",
        "dataloader",
        "seeds",
    },
}
# Features that use another feature. The list shrinks, to six at most.
PAIRS = {
    ("joint", "arrays"),
    ("joint", "threads"),
    ("seeding", "arrays"),
    ("state", "seeding"),
}


def without_tests(text: str) -> str:
    return text.split("#[cfg(test)]")[0].split("#[cfg(all(test")[0]


def core_edges() -> set[tuple[str, str]]:
    edges = set()
    for file in CORE.rglob("*.rs"):
        module = file.relative_to(CORE).parts[0].removesuffix(".rs")
        if module == "lib" or "tests" in file.parts or file.name == "tests.rs":
            continue
        code = re.sub(r"//.*", "", without_tests(file.read_text()))
        for used in re.findall(r"\bcrate::(?:\{([^}]*)\}|(\w+))", code):
            names = re.findall(r"(\w+)(?:::|,|\s*$)", used[0]) if used[0] else [used[1]]
            for name in names:
                target = {"Error": "error", "Result": "error"}.get(name, name)
                if target != module and target in CORE_MAY_USE:
                    edges.add((module, target))
    return edges


def test_the_core_depends_one_way() -> None:
    edges = core_edges()
    assert len(edges) > 20, "the expressions above no longer find anything"
    assert {edge for edge in edges if edge[1] not in CORE_MAY_USE[edge[0]]} == set()


def test_every_module_of_the_core_has_a_row() -> None:
    modules = {path.stem for path in CORE.iterdir()} - {"lib"}
    assert modules == set(CORE_MAY_USE)


def module_of(file: Path) -> str:
    """The dotted name of a module of the package, below the package's own."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(file) for file in PACKAGE.rglob("*.py")} | {"_native"}


def named_modules(dotted: str) -> set[str]:
    """Our module that a dotted name means, or that an attribute so named stands in."""
    parts = dotted.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    found = [one for name in names for one in (f"{name}.__init__", name) if one in MODULES]
    return set(found[-1:])


def python_edges() -> set[tuple[str, str]]:
    edges = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = re.findall(r"\bringloader\.[\w.]+\w", node.value)
            for name in names:
                if name.split(".")[0] == "ringloader":
                    edges |= {(module_of(file), found) for found in named_modules(name)}
    for file in BINDING.rglob("*.rs"):
        code = re.sub(r"//.*", "", file.read_text())
        for name in re.findall(r'"(ringloader\.[\w.]+)"', code):
            assert named_modules(name), f"{file.name} names {name}, which there is not"
            edges |= {("_native", found) for found in named_modules(name)}
    return {(one, other) for one, other in edges if one != other}


def room(module: str) -> str:
    """Returns the folder or top module that a module stands in; a feature's folder is one.

    The first module of a feature with options has their rows: a room of its own, below the table.
    """
    parts = module.split(".")
    if parts[0] == "_features" and parts[2:] == ["__init__"]:
        has_rows = (PACKAGE / "_features" / parts[1] / "texts.toml").exists()
        return "_features.options" if has_rows else f"_features.{parts[1]}"
    return ".".join(parts[:2]) if parts[0] == "_features" else parts[0]


def is_feature(name: str) -> bool:
    return name.startswith("_features.") and (PACKAGE / name.replace(".", "/")).is_dir()


def is_of_the_core(name: str) -> bool:
    return name in CORE_ROOMS | {"_native", "_log"}


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Sets of more than one node, each of which leads to all others."""
    reached = {node: {node} for edge in edges for node in edge}
    while True:
        before = sum(map(len, reached.values()))
        for one, other in edges:
            reached[one] |= reached[other]
        if sum(map(len, reached.values())) == before:
            break
    together = {frozenset(other for other in reached[one] if one in reached[other]) for one in reached}
    return sorted((set(found) for found in together if len(found) > 1), key=sorted)


def used_paths(code: str) -> set[str]:
    """All paths that begin with ``crate`` or ``super``, those in braces too."""
    paths = set(re.findall(r"\b(?:crate|super)(?:::\w+)+", code))
    for prefix, names in re.findall(r"\buse ((?:crate|super)(?:::\w+)*)::\{([^;]*)\};", code):
        paths |= {f"{prefix}::{name}" for name in re.findall(r"[\w:]+", names)}
    return paths


def core_file_edges() -> set[tuple[str, str]]:
    """Returns which file of the core uses which.

    A file and the folder of its name are one. What a ``mod.rs`` only hands on is its file's.
    """

    def unit(path: str) -> str:
        parts = path.split("/")
        parents = ("/".join(parts[:end]) for end in range(1, len(parts)))
        return next((parent for parent in parents if (CORE / f"{parent}.rs").exists()), path)

    names = {str(file.relative_to(CORE).with_suffix("")) for file in CORE.rglob("*.rs")}
    files = {name for name in names if Path(name).name not in {"tests", "lib"}}
    code = {file: re.sub(r"//.*", "", without_tests((CORE / f"{file}.rs").read_text())) for file in files}
    handed_on: dict[str, str] = {}
    exports = r"pub(?:\(\w+\))? use (\w+)::(?:\{([^}]*)\}|(\w+));"
    for file in (file for file in files if file.endswith("/mod")):
        folder = file.removesuffix("/mod")
        for child, several, one in re.findall(exports, code[file]):
            handed_on |= {
                f"{folder}/{name}": f"{folder}/{child}" for name in re.findall(r"\w+", several or one)
            }
        code[file] = re.sub(exports, "", code[file])
    edges = set()
    for file in files:
        for path in used_paths(code[file]):
            start, *rest = path.split("::")
            above = file.removesuffix("/mod").split("/")[:-1] if start == "super" else []
            heads = ["/".join([*above, *rest][:end]) for end in range(len(above) + len(rest), 0, -1)]
            found = (at for head in heads for at in (head, handed_on.get(head, head), f"{head}/mod"))
            target = next((at for at in found if at in files), None)
            edges |= {(unit(file), unit(target))} if target else set()
    return {(one, other) for one, other in edges if one != other}


def test_the_files_of_the_core_have_no_circles() -> None:
    edges = core_file_edges()
    assert {("transport/engine", "transport/message"), ("scheduler/mod", "transport/interface")} <= edges
    assert ("transport/port", "transport/engine") not in edges, "the worker's side uses the parent's"
    assert ("scheduler/mod", "transport/engine") not in edges, "the scheduler knows an implementation"
    assert circles(edges) == []


def binding_edges() -> set[tuple[str, str]]:
    """Returns which file of the binding uses which, by their paths without ``.rs``."""
    edges = set()
    files = {str(file.relative_to(BINDING).with_suffix("")) for file in BINDING.rglob("*.rs")} - {"lib"}
    for file in files:
        code = re.sub(r"//.*", "", without_tests((BINDING / f"{file}.rs").read_text()))
        for path in used_paths(code):
            start, *names = path.split("::")
            parts = [*(file.split("/")[:-1] if start == "super" else []), *names]
            found = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
            target = next((at for name in found for at in (name, f"{name}/mod") if at in files), None)
            assert target is not None, f"{file}: {path} names no file"
            edges.add((file, target))
    return edges


def test_the_binding_depends_one_way() -> None:
    edges = binding_edges()
    assert ("batch/decode", "batch/template") in edges and ("transport/port", "process") in edges
    between = {(one.split("/")[0], other.split("/")[0]) for one, other in edges}
    between = {(one, other) for one, other in between if one != other}
    assert {edge for edge in between if edge[1] not in BINDING_MAY_USE[edge[0]]} == set()
    assert {(one, other) for one in BINDING_MAY_USE for other in BINDING_MAY_USE[one]} - between == set()


def test_the_binding_has_no_circles() -> None:
    assert circles(binding_edges()) == []


def test_every_room_of_the_binding_has_a_row() -> None:
    assert {path.stem for path in BINDING.iterdir()} - {"lib"} == set(BINDING_MAY_USE)


def test_one_file_of_the_binding_names_our_python() -> None:
    named: dict[str, set[str]] = {}
    for file in BINDING.rglob("*.rs"):
        code = re.sub(r"//.*", "", file.read_text()).replace('"ringloader._native"', "")
        private = re.findall(r'"((?:_(?!_)|ringloader\.)[^"]*)"', code)
        if private:
            named[str(file.relative_to(BINDING))] = set(private)
    assert set(named) == set(BINDING_NAMES)
    for name, pattern in BINDING_NAMES.items():
        assert {text for text in named[name] if not re.match(pattern, text)} == set()


def test_the_package_depends_one_way() -> None:
    edges = python_edges()
    assert {"_start.processes", "_native", "_core.make"} <= {one for one, _ in edges}
    # By a string, by the binding's string, in a function, as an import of a name.
    assert ("_start.processes", "_worker.entry") in edges
    assert ("_native", "_common.pickling") in edges
    assert ("_core.make", "_core.make_transport") in edges
    assert ("_features.spawn_server", "_worker.entry") in edges
    between = {(room(one), room(other)) for one, other in edges if room(one) != room(other)}
    between = {pair for pair in between if not all(map(is_feature, pair))}
    between = {(one, other) for one, other in between if one not in CORE_ROOMS or is_of_the_core(other)}
    assert {edge for edge in between if edge[1] not in PYTHON_MAY_USE[edge[0]]} == set()
    assert {(one, other) for one in PYTHON_MAY_USE for other in PYTHON_MAY_USE[one]} - between == set()


def test_the_core_uses_nothing_above_it() -> None:
    edges = {edge for edge in python_edges() if room(edge[0]) in CORE_ROOMS}
    assert len(edges) > 100
    assert {edge for edge in edges if not is_of_the_core(room(edge[1]))} == set()


def test_features_use_others_only_in_pairs_that_are_listed() -> None:
    rooms = {(room(one), room(other)) for one, other in python_edges()}
    found = {(one, other) for one, other in rooms if one != other and is_feature(one) and is_feature(other)}
    assert {tuple(name.split(".")[1] for name in pair) for pair in found} == PAIRS


def test_only_the_loader_that_has_states_reaches_their_code() -> None:
    state = "_features.state"
    users = {one for one, other in python_edges() if room(other) == state and room(one) != state}
    assert users == {"stateful_dataloader"}


def test_the_package_has_no_circles() -> None:
    edges = python_edges()
    assert circles(edges) == []
    # The binding has no code of its own in a folder: its modules are judged above.
    rooms = {(room(one), room(other)) for one, other in edges if "_native" not in (one, other)}
    assert circles(rooms) == []
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [{"a", "b", "c"}]


def test_no_module_imports_through_the_package() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            through = isinstance(node, ast.ImportFrom) and node.module == "ringloader"
            assert not through, f"{file}: import the module"


def test_every_file_of_a_crate_is_a_module_of_it() -> None:
    for file in {*CORE.rglob("*.rs"), *BINDING.rglob("*.rs")} - {CORE / "lib.rs", BINDING / "lib.rs"}:
        module = file.parent if file.stem == "mod" else file.with_suffix("")
        parents = (module.parent / "mod.rs", module.parent.with_suffix(".rs"), module.parent / "lib.rs")
        declared = "".join(parent.read_text() for parent in parents if parent.is_file())
        assert re.search(rf"\bmod {module.name};", declared), file


def test_the_core_has_no_python_in_its_dependencies() -> None:
    manifest = (CORE.parent / "Cargo.toml").read_text()
    assert not re.search(r"^(pyo3|numpy|tch)\b", manifest, re.M)
