"""Programs of their own: what they print, what they leave, how they end."""

from __future__ import annotations

import os
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

from programs import client

_IMPORTS = {
    "ringloader": "from ringloader import DataLoader",
    "torch": "from torch.utils.data import DataLoader",
}

_TESTS = Path(__file__).resolve().parent.parent


@dataclass
class Ended:
    code: int
    out: str
    err: str


def source(loader_name: str, body: str) -> str:
    lines = [
        "import gc, multiprocessing, os, signal, sys, time",
        "import torch",
        _IMPORTS[loader_name],
        "from faults.failing_datasets import *",
        # Python's default since 3.14 is forkserver, which starts the program again.
        "multiprocessing.set_start_method('fork', force=True)",
        # A shell starts background programs with SIGINT ignored, and nohup with SIGHUP ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)",
    ]
    return "\n".join(lines) + "\n" + textwrap.dedent(body)


def start(loader_name: str, body: str, folder: Path) -> subprocess.Popen[str]:
    """Starts the program, in a file of its own so that spawned workers find their main module."""
    program = folder / "program.py"
    program.write_text(source(loader_name, body))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_TESTS), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "default",
        "PYTHONUNBUFFERED": "1",
    }
    return client.start(
        [str(program)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float) -> Ended:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the program hangs\n--- out\n{out}\n--- err\n{err}") from None
    return Ended(process.returncode, out, err)


def run_script(loader_name: str, body: str, folder: Path) -> Ended:
    return finish(start(loader_name, body, folder), 150)
