#!/usr/bin/env python3
"""Makes the wheel of systems without memfd from a Linux wheel: the same Python, and no binary.

``ci/portable_wheel.py WHEEL FOLDER``: reads the Linux wheel, and writes into the folder
``ringloader-VERSION-py3-none-any.whl``. One line of Python stands for the binary. The same wheel
gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

TAG = "py3-none-any"
MODULE = "ringloader/_native.py"
# All that Python reads of `_native` on such a system.
SOURCE = b"SUPPORTED = False\n"
# The binary, and the list of the crates that it is made of.
_LEFT_OUT = re.compile(r"ringloader/_native\.[^/]+\.so|[^/]+\.dist-info/(sboms/.+|RECORD)")
# The earliest that a zip file can name.
_TIME = (1980, 1, 1, 0, 0, 0)


def make(wheel: Path, folder: Path) -> Path:
    """Makes the wheel, and returns its path."""
    name, version = wheel.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        files = {
            one.filename: archive.read(one)
            for one in archive.infolist()
            if not one.is_dir() and not _LEFT_OUT.fullmatch(one.filename)
        }
    if MODULE in files:
        raise SystemExit(f"portable wheel: {wheel} has no binary; pass a wheel of Linux")
    files[MODULE] = SOURCE
    files[f"{info}/WHEEL"] = _about(files[f"{info}/WHEEL"])
    record = [f"{path},sha256={_hash(files[path])},{len(files[path])}\n" for path in sorted(files)]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    made = folder / f"{name}-{version}-{TAG}.whl"
    with zipfile.ZipFile(made, "w") as archive:
        # The metadata comes last, as wheels have it.
        for path in sorted(files, key=lambda path: (path.startswith(info), path)):
            member = zipfile.ZipInfo(path, _TIME)
            member.external_attr = 0o100644 << 16
            archive.writestr(member, files[path], zipfile.ZIP_DEFLATED)
    return made


def _about(text: bytes) -> bytes:
    """Returns the file ``WHEEL`` with the tag of any system, and no binary."""
    kept = [line for line in text.decode().splitlines() if line and not line.startswith(("Tag:", "Root-Is-"))]
    return "\n".join([*kept, "Root-Is-Purelib: true", f"Tag: {TAG}", ""]).encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(make(Path(sys.argv[1]), Path(sys.argv[2])))
