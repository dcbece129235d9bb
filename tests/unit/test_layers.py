"""Dependencies run one way: the table of ARCHITECTURE.md, kept."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "rust/core/src"
PACKAGE = ROOT / "python/ringloader"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()

# Module of the core: modules that it may use. `transport::layout` is where structures of pool and ring meet memory.
CORE_MAY_USE = {
    "error": set(),
    "bits": set(),
    "testing": set(),
    "sync": {"error", "bits", "testing"},
    "batch": {"error"},
    "plan": {"error", "bits"},
    "ring": {"error", "sync", "testing"},
    "pool": {"error", "sync", "testing"},
    "forks": {"sync", "testing"},
    "os": {"error", "sync"},
    "process": {"sync", "testing", "forks", "os"},
    "transport": {"error", "sync", "testing", "forks", "os", "process", "ring", "pool", "batch"},
    "scheduler": {"error", "testing", "plan", "transport"},
}

PYTHON_MAY_USE = {
    "__init__": {"_convert", "_install", "_path", "dataloader"},
    "__main__": {"_on_import", "_options", "_run"},
    "_run": set(),
    "_on_import": {"_hook", "_install", "_options", "dataloader"},
    "_convert": {"_options", "_seam", "dataloader"},
    "_install": {"_hook", "_options", "_seam", "dataloader"},
    "dataloader": {
        "_decide",
        "_hook",
        "_iterator",
        "_native",
        "_options",
        "_path",
        "_seam",
        "_spawn",
        "_transport",
    },
    "_iterator": {"_decide", "_native", "_path", "_samplers", "_seam", "_transport"},
    "_samplers": {"_native", "_seam", "_shuffle"},
    "_shuffle": {"_native", "_seam"},
    "_heap": set(),
    "_forkserver": set(),
    "_once": set(),
    "_inherited": set(),
    "_spawn": {"_inherited", "_spawn_server"},
    "_spawn_server": {"_processes", "_seam"},
    "_transport": {
        "_budget",
        "_forks",
        "_forkserver",
        "_moved",
        "_native",
        "_once",
        "_processes",
        "_seam",
        "_spawn",
        "_warm",
    },
    "_warm": {"_forks", "_native", "_notes"},
    "_processes": {"_collation", "_forks", "_heap", "_moved", "_native", "_seam"},
    "_moved": {"_native", "_seam"},
    "_collation": {"_native", "_seam"},
    "_decide": {"_native", "_seam"},
    "_seam": set(),
    "_batches": set(),
    "_forks": {"_native"},
    "_budget": set(),
    "_path": {"_notes"},
    "_notes": set(),
    "_hook": set(),
    "_options": set(),
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


def python_edges() -> set[tuple[str, str]]:
    edges = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "ringloader":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ringloader."):
                names = [node.module.split(".")[1]]
            edges |= {(file.stem, name) for name in names}
    return edges


def test_the_package_depends_one_way() -> None:
    edges = python_edges()
    assert len(edges) > 5
    assert {edge for edge in edges if edge[1] not in PYTHON_MAY_USE[edge[0]]} == set()


def test_unsafe_code_stays_where_the_architecture_page_says() -> None:
    named = set(re.findall(r"^\| `((?:core|py)/src/\S+\.rs)` \|", PAGE, re.M))
    with_unsafe = {
        str(file.relative_to(ROOT / "rust"))
        for crate in ("core", "py")
        for file in (ROOT / "rust" / crate / "src").rglob("*.rs")
        if re.search(r"\bunsafe\b(?!_)", re.sub(r"//.*|\"[^\"]*\"", "", file.read_text()))
    }
    assert with_unsafe == named


def test_every_named_ordering_has_two_ends() -> None:
    sites: dict[str, int] = {}
    for file in (ROOT / "rust").rglob("src/**/*.rs"):
        for name in re.findall(r"ORDERING ([\w-]+)", file.read_text()):
            sites[name] = sites.get(name, 0) + 1
    assert sites
    assert {name for name, count in sites.items() if count < 2} == set()
    documented = set(re.findall(r"^\| `([\w-]+)` \| .* \| .* \| .* \|$", PAGE, re.M))
    assert set(sites) <= documented


def test_the_core_has_no_python_in_its_dependencies() -> None:
    manifest = (CORE.parent / "Cargo.toml").read_text()
    assert not re.search(r"^(pyo3|numpy|tch)\b", manifest, re.M)
