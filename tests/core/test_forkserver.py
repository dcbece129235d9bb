"""The fork server has torch before it forks, unless the program has said what it imports."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringloader


class Server:
    """Tells of the worker's parent, which is the fork server."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        maps = Path(f"/proc/{os.getppid()}/maps").read_text()
        # The second is numpy.random's, which numpy imports at its first use: torch's seeding, in each worker.
        return "libtorch_cpu" in maps and "bit_generator" in maps


def started(case):
    """Returns what the server has, in a process that starts its first one. Run as a program of its own."""
    context = multiprocessing.get_context("forkserver")
    if case == "user's list":
        multiprocessing.set_forkserver_preload(["json"])
    if case == "running":
        process = context.Process(target=print)
        process.start()
        process.join()
    method = case if case in ("fork", "spawn") else context
    loader = ringloader.DataLoader(Server(), batch_size=None, num_workers=1, multiprocessing_context=method)
    has_torch = next(iter(loader))
    from multiprocessing import forkserver

    return has_torch, forkserver._forkserver._preload_modules


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("case", "has_torch"),
    [
        ("first", True),
        *(pytest.param(case, False, marks=pytest.mark.slow) for case in ("user's list", "running")),
        ("spawn", True),
        ("fork", True),
    ],
)
def test_what_the_server_imports(case, has_torch):
    code = (
        "import json\nfrom core import test_forkserver\n"
        f"if __name__ == '__main__':\n    print(json.dumps(test_forkserver.started({case!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=80, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    found, modules = json.loads(ended.stdout.splitlines()[-1])
    assert found == has_torch
    if case == "first":
        assert "torch" in modules
        assert not any(name.startswith("unit") for name in modules), "a module of the user's"
    else:
        assert modules == (["json"] if case == "user's list" else ["__main__"])
