"""What must hold of the files that are published: nothing is missing, nothing is there by accident."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "python/"
IN_SDIST = re.compile(
    r"PKG-INFO|Cargo\.(toml|lock)|LICENSE|README\.md|pyproject\.toml"
    r"|rust/(core|py)/(Cargo\.toml|(src|tests)/.+\.rs)|rust/core/tests/batch/corpus/[^/.]+"
)
SDIST_MUST_HAVE = {"PKG-INFO", "Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "pyproject.toml"}
# A free-threaded CPython has no stable ABI: its module is named after its version.
MODULE = re.compile(r"ringloader/_native\.(abi3|cpython-3\d+t-[\w-]+)\.so")
DIST_INFO = re.compile(r"METADATA|WHEEL|RECORD|licenses/LICENSE|sboms/ringloader-py\.cyclonedx\.json")


def main() -> None:
    """Checks each file of the folder that is named."""
    folder = Path(sys.argv[1])
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    tracked = subprocess.run(
        ["git", "ls-files", "-z", PACKAGE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    modules = set(filter(None, tracked.stdout.split("\0")))
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    strangers = set(folder.iterdir()) - {*wheels, *sdists}
    expect(bool(wheels or sdists) and not strangers, f"{folder} has {sorted(map(str, folder.iterdir()))}")
    for path in sdists:
        check_sdist(path, version, modules)
    for path in wheels:
        check_wheel(path, version, {name.removeprefix(PACKAGE) for name in modules})


def check_sdist(path: Path, version: str, modules: set[str]) -> None:
    """The sources, the files that a build reads, and those that a licence asks for."""
    top = f"ringloader-{version}/"
    expect(path.name == f"ringloader-{version}.tar.gz", f"{path.name}: not version {version}")
    with tarfile.open(path) as archive:
        names = {member.name for member in archive if not member.isdir()}
        metadata = archive.extractfile(top + "PKG-INFO")
        assert metadata is not None
        check_metadata(path, metadata.read(), version)
    names = {name.removeprefix(top) for name in names}
    missing = (SDIST_MUST_HAVE | modules) - names
    expect(not missing, f"{path.name} lacks {sorted(missing)}")
    strangers = {name for name in names - modules if not IN_SDIST.fullmatch(name)}
    expect(not strangers, f"{path.name} has {sorted(strangers)}")
    sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes, {len(names)} files\n")


def check_wheel(path: Path, version: str, modules: set[str]) -> None:
    """The package, one binary, and the metadata."""
    info = f"ringloader-{version}.dist-info/"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        check_metadata(path, archive.read(info + "METADATA"), version)
        binaries = [name for name in names if MODULE.fullmatch(name)]
        expect(len(binaries) == 1, f"{path.name} has the binaries {binaries}")
        strangers = {
            name
            for name in names - modules - set(binaries)
            if not (name.startswith(info) and DIST_INFO.fullmatch(name.removeprefix(info)))
        }
        missing = (modules | {info + "licenses/LICENSE"}) - names
        expect(not missing, f"{path.name} lacks {sorted(missing)}")
        expect(not strangers, f"{path.name} has {sorted(strangers)}")
        binary = archive.read(binaries[0])
    for folder in {f"{Path.home()}/", f"{ROOT}/"} - {"//"}:
        at = binary.find(folder.encode())
        expect(at < 0, f"{path.name} names a folder of this machine: {binary[at : at + 80]!r}")
    sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes, {binaries[0]}: {len(binary):,}\n")


def check_metadata(path: Path, text: bytes, version: str) -> None:
    """What an index and pip read."""
    metadata = email.message_from_bytes(text)
    expect(metadata["Version"] == version, f"{path.name} is version {metadata['Version']}, not {version}")
    for name in ("Requires-Python", "License-Expression", "Description-Content-Type"):
        expect(bool(metadata[name]), f"{path.name} has no {name}")


def expect(holds: bool, message: str) -> None:
    """Ends with ``message`` where something does not hold."""
    if not holds:
        raise SystemExit(f"wheel: {message}")


if __name__ == "__main__":
    main()
