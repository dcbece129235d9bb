"""Virtual environments with ringloader, perhaps the environment's hook, and torch or something like it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import torch

import ringloader

EXTRA = Path(__file__).parents[2] / "extras/autoinstall"

# A torch with no more than the hook needs, which is imported in no time.
FAKE_LOADER = """
class DataLoader:
    def _get_iterator(self):
        return "torch's own"
"""

# A program that prints what it sees of the hook, in one line.
STATE = """
import sys
from torch.utils.data.dataloader import DataLoader
print("hooked" if hasattr(DataLoader._get_iterator, "__wrapped__") else "torch")
"""


@dataclass(frozen=True)
class Python:
    """An interpreter, and its site-packages."""

    executable: Path
    packages: Path

    def run(
        self, *arguments: str | Path, install: str | None = None, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to its end, with ``RINGLOADER_INSTALL`` as given."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "RINGLOADER", "COV_"))
        }
        if install is not None:
            inherited["RINGLOADER_INSTALL"] = install
        return subprocess.run(
            [self.executable, *arguments],
            env=inherited | environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )


def make_python(folder: Path, *, hook: bool = True, real_torch: bool = False) -> Python:
    """A virtual environment in ``folder`` with ringloader as it is tested."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "ringloader").symlink_to(Path(ringloader.__file__).parent)
    if hook:
        for file in EXTRA.glob("ringloader_autoinstall.*"):
            (packages / file.name).write_bytes(file.read_bytes())
    if real_torch:
        homes = {
            str(Path(module.__file__).parents[1])
            for module in (torch, sys.modules["numpy"])
            if module.__file__
        }
        (packages / "torch_of_the_tests.pth").write_text("\n".join(sorted(homes)))
    else:
        data = packages / "torch/utils/data"
        data.mkdir(parents=True)
        for package in (data, data.parent, data.parents[1]):
            (package / "__init__.py").touch()
        (data / "dataloader.py").write_text(FAKE_LOADER)
    return Python(folder / "bin/python", packages)
