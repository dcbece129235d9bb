"""Builds `backend.cpp` for the torch that is installed: one call of g++, kept in `build/` until a change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("backend.cpp")
KEPT = Path(__file__).parents[2] / "build" / "accelerator"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wno-interference-size")


class CannotBuildError(RuntimeError):
    """No compiler, or it failed: what it said."""


def library() -> Path:
    """The extension's file, built if it is not there.

    Raises:
        CannotBuildError: There is no g++, or it failed.
    """
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    digest = hashlib.sha256()
    for part in (SOURCE.read_bytes(), abi.encode(), *(flag.encode() for flag in FLAGS)):
        digest.update(part)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = KEPT / f"torch-{torch.__version__}-python-{python}-{digest.hexdigest()[:16]}" / "pretend.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise CannotBuildError(f"there is no {compiler}")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(".unfinished")
    includes = (f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include")
    libraries = (f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10")
    command = [compiler, *FLAGS, abi, *includes, str(SOURCE), "-o", str(made), *libraries]
    with target.with_suffix(".lock").open("w") as lock:
        # Another process may build it at this moment.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CannotBuildError(f"{' '.join(command)}\n{done.stderr}")
            made.rename(target)
    return target


if __name__ == "__main__":
    library()
