"""What must hold of the files that are published: nothing is missing, nothing is there by accident."""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1]))

from ci import portable_wheel

ROOT = Path(__file__).parents[1]
PACKAGE = "python/"
IN_SDIST = re.compile(
    r"PKG-INFO|Cargo\.(toml|lock)|LICENSE|DESCRIPTION\.md|pyproject\.toml"
    r"|rust/(core|py|testing)/(Cargo\.toml|build\.rs|(src|tests)/.+\.rs)|rust/core/tests/batch/corpus/[^/.]+"
)
SDIST_MUST_HAVE = {"PKG-INFO", "Cargo.toml", "Cargo.lock", "LICENSE", "DESCRIPTION.md", "pyproject.toml"}
# The module of a free-threaded CPython is named after its version.
MODULE = re.compile(r"ringloader/_native\.(abi3|cpython-3\d+t-[\w-]+)\.so")
DIST_INFO = re.compile(r"METADATA|WHEEL|RECORD|licenses/LICENSE|sboms/ringloader-py\.cyclonedx\.json")
# What pyproject.toml must have addresses of.
ADDRESSES = {"Documentation", "Repository", "Changelog", "Issues"}
# A link or picture of Markdown, in place or by reference, and of HTML.
LINK = re.compile(
    r"""\]\(\s*<?([^)>\s]+)|^ {0,3}\[[^]]+\]:\s*<?(\S+)|\b(?:href|src)\s*=\s*["']?([^"'\s>]+)""", re.M
)


def main() -> None:
    """Checks each file of the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", action="store_true", help="the files are to be published")
    given = parser.parse_args()
    folder, version = given.folder, version_of_sources()
    release = given.release or not Version(version).is_devrelease
    if release:
        check_release(version, (ROOT / "CHANGELOG.md").read_text())
    tracked = subprocess.run(
        ["git", "ls-files", "-z", PACKAGE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    # The folders' pages for developers stay in the repository.
    modules = {name for name in tracked.stdout.split("\0") if name and not name.endswith("/README.md")}
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    strangers = set(folder.iterdir()) - {*wheels, *sdists}
    expect(bool(wheels or sdists) and not strangers, f"{folder} has {sorted(map(str, folder.iterdir()))}")
    for path in sdists:
        check_sdist(path, version, modules, release)
    for path in wheels:
        check_wheel(path, version, {name.removeprefix(PACKAGE) for name in modules}, release)


def check_sdist(path: Path, version: str, modules: set[str], release: bool) -> None:
    """The sources, the files that a build reads, and those that a licence asks for."""
    top = f"ringloader-{version}/"
    expect(path.name == f"ringloader-{version}.tar.gz", f"{path.name}: not version {version}")
    with tarfile.open(path) as archive:
        names = {member.name for member in archive if not member.isdir()}
        metadata = archive.extractfile(top + "PKG-INFO")
        assert metadata is not None
        check_metadata(path, metadata.read(), version, release)
    names = {name.removeprefix(top) for name in names}
    missing = (SDIST_MUST_HAVE | modules) - names
    expect(not missing, f"{path.name} lacks {sorted(missing)}")
    strangers = {name for name in names - modules if not IN_SDIST.fullmatch(name)}
    expect(not strangers, f"{path.name} has {sorted(strangers)}")
    sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes, {len(names)} files\n")


def check_wheel(path: Path, version: str, modules: set[str], release: bool) -> None:
    """The package, one binary or the line that stands for it, and the metadata."""
    info = f"ringloader-{version}.dist-info/"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        check_metadata(path, archive.read(info + "METADATA"), version, release)
        binaries = [name for name in names if MODULE.fullmatch(name)]
        if path.stem.endswith(portable_wheel.TAG):
            expect(not binaries, f"{path.name} has the binaries {binaries}")
            binaries = [portable_wheel.MODULE]
            expect(portable_wheel.MODULE in names, f"{path.name} lacks {portable_wheel.MODULE}")
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
    if binaries == [portable_wheel.MODULE]:
        expect(binary == portable_wheel.SOURCE, f"{path.name} has another {binaries[0]}: {binary[:80]!r}")
    for folder in {f"{Path.home()}/", f"{ROOT}/"} - {"//"}:
        at = binary.find(folder.encode())
        expect(at < 0, f"{path.name} names a folder of this machine: {binary[at : at + 80]!r}")
    sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes, {binaries[0]}: {len(binary):,}\n")


def version_of_sources() -> str:
    """Returns the version in Cargo.toml, as Python writes it: ``0.3.0-dev.0`` is ``0.3.0.dev0``."""
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    return str(Version(cargo["workspace"]["package"]["version"]))


def check_release(version: str, changelog: str) -> None:
    """What a version needs to be published, beside what each build needs."""
    expect(not Version(version).is_devrelease, f"{version} is a version in development: no release")
    heading = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M)
    expect(heading is not None, f"CHANGELOG.md has no heading '## [{version}] - <date>'")


def check_metadata(path: Path, text: bytes, version: str, release: bool) -> None:
    """What an index and pip read."""
    metadata = email.message_from_bytes(text)
    expect(metadata["Version"] == version, f"{path.name} is version {metadata['Version']}, not {version}")
    for name in ("Requires-Python", "License-Expression", "Description-Content-Type"):
        expect(bool(metadata[name]), f"{path.name} has no {name}")
    addresses = dict(address.split(", ", 1) for address in metadata.get_all("Project-URL", []))
    expect(set(addresses) == ADDRESSES, f"{path.name} has the addresses {sorted(addresses)}")
    if release:
        unfilled = [name for name, address in addresses.items() if is_placeholder(address)]
        expect(not unfilled, f"{path.name} has placeholders in [project.urls] of pyproject.toml: {unfilled}")
    relative = list(relative_links(text.decode().partition("\n\n")[2]))
    expect(not relative, f"the description of {path.name} has links to files: {relative}")


def is_placeholder(address: str) -> bool:
    """True if the address is in the domain ``invalid``, which is reserved and leads nowhere."""
    return f".{urlsplit(address).hostname}".endswith(".invalid")


def relative_links(markdown: str) -> Iterator[str]:
    """Yields the targets of links that an index cannot follow: files of the repository."""
    for found in LINK.finditer(re.sub(r"^```.*?^```$|`[^`\n]*`", "", markdown, flags=re.M | re.S)):
        target = next(filter(None, found.groups()))
        if not (urlsplit(target).scheme or target.startswith("#")):
            yield target


def expect(holds: bool, message: str) -> None:
    """Ends with ``message`` where something does not hold."""
    if not holds:
        raise SystemExit(f"wheel: {message}")


if __name__ == "__main__":
    main()
