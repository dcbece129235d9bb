"""Each measurement of the benchmark has a process of its own, which ends with it."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from bench_parts import write_demo

from programs import client

pytestmark = pytest.mark.rings_only


@pytest.fixture
def demo(tmp_path):
    return write_demo(tmp_path)


PROGRAM = """
import calls
from ringloader._tools.bench import arguments, child, command

def told(function, *given):
    try:
        return child.call(function, *given)
    except Exception as error:
        return type(error).__name__, error.text, error.users

if __name__ == "__main__":
    words = ["demo.py:make", "--workers", "1", "--rounds", "1", "--seconds", "0.05", "--json", "out.json"]
    raise SystemExit(command.run(arguments.parse(words)) or print([told(*call) for call in calls.CALLS]))
"""
CALLS = """
import multiprocessing, os, signal, sys
from ringloader._tools.bench.arguments import TargetError

def add(one, other):
    print("not shown")
    return one + other, multiprocessing.get_start_method()

def stop():
    raise TargetError("no loader", "traceback")

def fail():
    raise ValueError("bad", "sample")

def die():
    os.write(2, b"Aborted")
    os.kill(os.getpid(), signal.SIGKILL)

def leave():
    os._exit(4)

CALLS = [(add, 1, 2), (stop,), (fail,), (die,), (leave,)]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
def test_each_measurement_has_a_process_which_returns_or_says_how_it_ended(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = client.run(
        ["program.py"], timeout=150, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "Batches: the first 16 of both loaders are equal, with num_workers=1." in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["recommended"] == {"num_workers": 1}
    added, stopped, failed, killed, left = ast.literal_eval(done.stdout.splitlines()[-1])
    assert added == (3, multiprocessing.get_context().get_start_method())
    assert stopped == ("TargetError", "no loader", "traceback")
    assert failed[:2] == ("RunError", "ValueError: ('bad', 'sample')") and "in fail\n" in failed[2]
    assert killed == ("RunError", "its process was killed by signal 9 (Killed)", "Aborted")
    assert left == ("RunError", "its process ended with exit code 4", "")


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_its_processes(tmp_path, number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = ["-m", "ringloader", "bench", "demo.py:waits"]
    process = client.start(words, env=dict(os.environ), cwd=tmp_path, **pipes)
    started = tmp_path / "started"
    for _ in range(400):
        if started.exists() and started.read_text():
            break
        time.sleep(0.1)
    os.kill(process.pid, number)
    assert process.communicate(timeout=20) == ("", "python -m ringloader bench: interrupted\n")
    assert process.returncode == 130
    assert not Path(f"/proc/{int(started.read_text())}").exists()
