"""The wheel for macOS and Windows: made of a Linux wheel, and taken by pip only where no other fits."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ci import check_dist, portable_wheel

pytestmark = pytest.mark.rings_only

VERSION = "1.2.3"
INFO = f"ringloader-{VERSION}.dist-info"
LINUX = f"ringloader-{VERSION}-cp311-abi3-manylinux_2_28_x86_64.whl"
FILES = {
    "ringloader/__init__.py": "",
    "ringloader/py.typed": "",
    "ringloader/_native.pyi": "SUPPORTED: bool",
    "ringloader/_native.abi3.so": "binary",
    f"{INFO}/METADATA": f"Metadata-Version: 2.4\nName: ringloader\nVersion: {VERSION}\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-abi3-manylinux_2_28_x86_64\n",
    f"{INFO}/sboms/ringloader-py.cyclonedx.json": "{}",
    f"{INFO}/licenses/LICENSE": "free",
    f"{INFO}/RECORD": "",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a Linux wheel, and the wheel that is made of it."""
    with zipfile.ZipFile(tmp_path / LINUX, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    portable_wheel.make(tmp_path / LINUX, tmp_path)
    return tmp_path


def test_it_has_a_line_of_python_for_the_binary(folder):
    with zipfile.ZipFile(folder / f"ringloader-{VERSION}-py3-none-any.whl") as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    left_out = {"ringloader/_native.abi3.so", f"{INFO}/sboms/ringloader-py.cyclonedx.json"}
    assert set(files) == set(FILES) - left_out | {"ringloader/_native.py"}
    assert files["ringloader/_native.py"] == b"SUPPORTED = False\n"
    same = set(files) & set(FILES) - {f"{INFO}/WHEEL", f"{INFO}/RECORD"}
    assert all(files[name].decode() == FILES[name] for name in same)
    assert files[f"{INFO}/WHEEL"].decode().splitlines() == [
        *("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any")
    ]
    recorded = {path: size for path, _, size in csv.reader(io.StringIO(files[f"{INFO}/RECORD"].decode()))}
    assert recorded == {name: str(len(files[name])) for name in files} | {f"{INFO}/RECORD": ""}


def test_the_same_wheel_gives_the_same_bytes_and_another_is_refused(folder, tmp_path):
    made = folder / f"ringloader-{VERSION}-py3-none-any.whl"
    before = made.read_bytes()
    assert portable_wheel.make(folder / LINUX, folder) == made
    assert made.read_bytes() == before
    with pytest.raises(SystemExit, match="has no binary; pass a wheel of Linux"):
        portable_wheel.make(made, tmp_path)


@pytest.mark.parametrize(
    ("platform", "taken"),
    [
        ("manylinux_2_28_x86_64", "cp311-abi3-manylinux_2_28_x86_64"),
        ("macosx_11_0_arm64", "py3-none-any"),
        ("win_amd64", "py3-none-any"),
    ],
)
def test_pip_takes_the_linux_wheel_where_it_fits(folder, tmp_path, platform, taken):
    """And installs what it takes: pip compares the files with their RECORD."""
    words = ["--no-index", "--no-deps", "--only-binary=:all:", "--find-links", str(folder), "--no-cache-dir"]
    words += ["--platform", platform, "--target", str(tmp_path / "installed"), "ringloader"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *words]
    subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    about = (tmp_path / "installed" / INFO / "WHEEL").read_text()
    assert f"Tag: {taken}" in about.splitlines()
    assert (tmp_path / "installed/ringloader/_native.py").exists() == (taken == "py3-none-any")


def test_what_is_published_is_checked(folder, capsys, monkeypatch):
    monkeypatch.setattr(check_dist, "check_metadata", lambda *_: None)
    made = folder / f"ringloader-{VERSION}-py3-none-any.whl"
    modules = {name for name in FILES if name.endswith((".py", ".pyi", "py.typed"))}
    check_dist.check_wheel(made, VERSION, modules, release=False)
    assert "ringloader/_native.py: 18" in capsys.readouterr().out
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("ringloader/_native.abi3.so", "binary")
    with pytest.raises(SystemExit, match=r"has the binaries \['ringloader/_native\.abi3\.so'\]"):
        check_dist.check_wheel(made, VERSION, modules, release=False)
    with zipfile.ZipFile(folder / LINUX) as linux, zipfile.ZipFile(made, "w") as archive:
        for name in modules | {f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"}:
            archive.writestr(name, linux.read(name))
        archive.writestr("ringloader/_native.py", "SUPPORTED = True\n")
    with pytest.raises(SystemExit, match=r"has another ringloader/_native\.py: b'SUPPORTED = True"):
        check_dist.check_wheel(made, VERSION, modules, release=False)
