"""Pages that list modules, tests, unsafe code and orderings have all that there is, and nothing else."""

import ast
import re
from pathlib import Path

from test_layers import CORE, CORE_MAY_USE, MODULES, PACKAGE, PYTHON_MAY_USE, ROOT, room

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
UNSAFE = (ROOT / "docs/dev/unsafe.md").read_text()
MAP = (ROOT / "tests/README.md").read_text()


FOLDERS = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]


def test_the_map_has_every_folder_of_the_package() -> None:
    rooms = {room(module) for module in MODULES}
    assert rooms - {"_features.__init__"} == set(PYTHON_MAY_USE)
    tops = {folder.name for folder in FOLDERS if folder.parent == PACKAGE}
    assert set(re.findall(r"^\| `(_\w+)/` \|", PAGE, re.M)) == tops


def test_every_folder_of_the_package_has_its_page() -> None:
    titles = {folder: (folder / "README.md").read_text().splitlines()[0] for folder in FOLDERS}
    for folder, title in titles.items():
        assert title.startswith(f"# `{folder.relative_to(PACKAGE)}`: "), (folder, title)


def test_the_architecture_page_stays_short() -> None:
    assert len(PAGE.encode()) <= 12 << 10, "move what documents one module to it, or to its folder's page"


def test_folders_are_small() -> None:
    for folder in FOLDERS:
        assert len(list(folder.glob("[!_]*.py"))) <= 14, folder


def test_each_module_says_what_it_is_about() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text())), file


def files_of(cell: str, root: Path) -> list[Path]:
    """Returns the files and folders that a cell of a table names."""
    found = []
    for name in re.findall(r"`([^`]+)`", cell):
        paths = sorted(root.glob(name))
        assert paths, f"tests/README.md names {name}, which is not in {root}"
        found += paths
    return found


def test_each_module_of_the_package_has_tests() -> None:
    """By the name of the file, or by a row of the map."""
    named: dict[str, list[Path]] = {}
    for room_name, modules, tests in re.findall(r"^\| `(\.|_[\w/]+)` \| (.*) \| (.*) \|$", MAP, re.M):
        for module in re.findall(r"`(\w+)`", modules):
            name = module if room_name == "." else f"{room_name.replace('/', '.')}.{module}"
            assert name in MODULES, f"tests/README.md names {name}, which is no module"
            assert name not in named, f"tests/README.md has two rows for {name}"
            named[name] = files_of(tests, ROOT / "tests")
            assert named[name], name
    of_their_name = {file.stem.removeprefix("test_") for file in (ROOT / "tests").rglob("test_*.py")}
    modules = {name for name in MODULES if not name.endswith("__init__") and name != "_native"}
    without = {name for name in modules if name.split(".")[-1].strip("_") not in of_their_name}
    assert len(named) > 80
    assert without - set(named) == set()


def test_each_module_of_the_core_has_tests() -> None:
    named: set[str] = set()
    table = MAP.split("| module of the core |")[1]
    for modules, tests in re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.M):
        names = set(re.findall(r"`(\w+)`", modules))
        found = files_of(tests, ROOT / "rust/core/tests")
        if tests.startswith("in its files"):
            found += [
                file
                for name in names
                for file in (CORE / name).rglob("*.rs")
                if "#[cfg(test)]" in file.read_text() or "#[cfg(all(test" in file.read_text()
            ]
        assert found, names
        named |= names
    assert named == set(CORE_MAY_USE)


def test_unsafe_code_stays_where_its_page_says() -> None:
    named = set(re.findall(r"^\| `((?:core|py)/src/\S+\.rs)` \|", UNSAFE, re.M))
    with_unsafe = {
        str(file.relative_to(ROOT / "rust"))
        for crate in ("core", "py")
        for file in (ROOT / "rust" / crate / "src").rglob("*.rs")
        if file.name != "tests.rs"
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
    documented = set(re.findall(r"^\| `([\w-]+)` \| .* \| .* \| .* \|$", UNSAFE, re.M))
    assert set(sites) == documented
