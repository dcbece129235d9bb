#!/usr/bin/env python3
"""The gate `make systems`: the wheel of other systems, run as macOS and as Windows would run it.

``ci/systems.py PYTHON WHEELS [WORD...]``: makes that wheel of the Linux wheel in the folder WHEELS, and
installs it into an environment of its own, which has torch and pytest from PYTHON's. There it runs
``tests/systems`` and parity tests. ``tests/systems/lacking.py`` takes away what the system's Python lacks.
The words go to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ci import portable_wheel  # noqa: E402

from systems import lacking  # noqa: E402

FOLDER = ROOT / "build/systems"
# Tests that hold on torch's path too. Their workers are forked, which Windows cannot.
_ORDER = "tests/parity/test_order.py::test_"
PARITY = {
    "darwin": [
        *(f"{_ORDER}{name}" for name in ("map_style", "batch_samplers", "getitems", "sampler_that_fails")),
        "tests/parity/test_lifecycle.py::test_an_iterator_cannot_be_pickled",
    ],
    "win32": [],
}


def main(python: str, wheels: Path, words: list[str]) -> int:
    """Returns the exit code: 0 where all tests passed on each system."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    found = sorted(wheels.glob("*linux*.whl"))
    if len(found) != 1:
        raise SystemExit(f"systems: {wheels} has {len(found)} wheels of Linux, not one")
    shutil.copy(found[0], FOLDER)
    interpreter = environment(python, portable_wheel.make(found[0], FOLDER))
    # At the same time: most of the time they wait for workers to import torch.
    runs = {system: start(interpreter, system, words) for system in lacking.SYSTEMS}
    for system, process in runs.items():
        process.wait()
        print(f"as on {system}:\n{printed_by(system).read_text(errors='replace')}", flush=True)
    return int(any(process.returncode for process in runs.values()))


def printed_by(system: str) -> Path:
    """Returns the file that has what the tests print, as on a system."""
    return FOLDER / f"{system}.txt"


def environment(python: str, wheel: Path) -> str:
    """Makes an environment with the wheel, which sees the packages of ``python``. Returns its interpreter."""
    place = FOLDER / "environment"
    subprocess.run([python, "-m", "venv", "--without-pip", place], check=True)
    interpreter = str(place / "bin/python")
    words = ["--no-index", "--no-deps", "--no-compile", wheel]
    subprocess.run([python, "-m", "pip", "-q", "--python", interpreter, "install", *words], check=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run([one, "-c", purelib], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        for one in (python, interpreter)
    )
    # After this environment's own packages: that folder may have a ringloader too.
    Path(ours, "packages.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
    shutil.copy(lacking.__file__, Path(ours, "ringloader_lacking.py"))
    Path(ours, "zz_lacking.pth").write_text("import ringloader_lacking; ringloader_lacking.begin()\n")
    return interpreter


def start(interpreter: str, system: str, words: list[str]) -> subprocess.Popen[bytes]:
    """Starts the tests as on a system, and returns the process."""
    command = [
        interpreter,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--path",
        "torch",
    ]
    command += ["tests/systems", *PARITY[system], *words]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOADER")}
    variables[lacking.VARIABLE] = system
    with printed_by(system).open("w") as printed:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=printed, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    began = time.monotonic()
    code = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    print(f"systems: {time.monotonic() - began:.0f} s")
    sys.exit(code)
