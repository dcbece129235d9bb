"""Programs without ``if __name__ == "__main__":``, whose main file is run again for each worker."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from programs import client

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

LAST = """RuntimeError: workers of the start method {method!r} run the main file again, and {file} starts \
workers each time that it is run. Put what the program does into a function, and call it under the guard

    if __name__ == "__main__":
        main()

or pass {fork}
"""

# Makes any fork server run the main file, as that of Python 3.14 does.
PRELOAD_MAIN = """
    from multiprocessing import spawn

    if __name__ == "__main__":
        prepared = spawn.get_preparation_data

        def with_main(name):
            data = prepared(name)
            return data | {"main_path": data["init_main_from_path"]}

        spawn.get_preparation_data = with_main
"""

BEGIN = """
    import atexit, multiprocessing, sys
    import torch, ringloader
    from torch.utils.data import TensorDataset

    atexit.register(print, "left")
    dataset = TensorDataset(torch.arange(8))
    context = {{"multiprocessing_context": {method!r}}}
"""

FORK = "multiprocessing_context='fork'"
# A program, and the argument that its message names.
PROGRAMS = {
    "loader": ("list(ringloader.DataLoader(dataset, num_workers=2, **context))", FORK),
    "restarts": ("list(ringloader.DataLoader(dataset, num_workers=2, restart_workers=2, **context))", FORK),
    "installed": (
        "ringloader.install(); list(torch.utils.data.DataLoader(dataset, num_workers=1, **context))",
        FORK,
    ),
    "in a function": (
        "def main():\n    next(iter(ringloader.DataLoader(dataset, num_workers=1, **context)))\n\nmain()",
        FORK,
    ),
    "dispatch": (
        "source = ringloader.Dispatch(torch.utils.data.ChainDataset([]))\n"
        "list(ringloader.DataLoader(source, num_workers=1, **context))",
        FORK,
    ),
    "pool": (
        "pool = ringloader.WorkerPool(1, *context.values())\n"
        "list(ringloader.DataLoader(dataset, num_workers=1, worker_pool=pool))",
        "start_method='fork' to the WorkerPool",
    ),
}


def _run(folder: Path, method: str, program: str, begin: str = "") -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    parts = (begin, BEGIN.format(method=method))
    file.write_text("\n".join(map(textwrap.dedent, parts)) + program + "\n")
    return client.run(
        [str(file)], timeout=100, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def _main_traceback(err: str) -> str:
    """Returns what the main process has printed: workers print a line each, whenever they come to it."""
    lines = err.splitlines(keepends=True)
    ours = [line for line in lines if line.startswith("ringloader: line ")]
    assert ours, err
    assert all("starts workers while it is run again for a worker" in line for line in ours)
    return "".join(line for line in lines if line not in ours)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_one_error_says_what_the_main_file_needs(tmp_path: Path, kind: str, method: str) -> None:
    program, fork = PROGRAMS[kind]
    ended = _run(tmp_path, method, program)
    assert ended.returncode == 1
    err = _main_traceback(ended.stderr)
    assert err.count("Traceback") == 1, err
    assert "is restarted" not in err
    assert err.endswith(LAST.format(method=method, file=tmp_path / "program.py", fork=fork)), err


@pytest.mark.parametrize(
    "kind",
    [
        "loader",
        pytest.param("dispatch", marks=pytest.mark.slow),
        pytest.param("pool", marks=pytest.mark.slow),
    ],
)
def test_a_fork_server_that_runs_the_main_file_itself(tmp_path: Path, kind: str) -> None:
    program, fork = PROGRAMS[kind]
    ended = _run(tmp_path, "forkserver", program, PRELOAD_MAIN)
    assert ended.returncode == 1
    err = _main_traceback(ended.stderr)
    assert err.count("Traceback") == 1, err
    assert err.endswith(LAST.format(method="forkserver", file=tmp_path / "program.py", fork=fork)), err


@pytest.mark.parametrize("default", ["spawn", "forkserver"])
def test_the_remedies(tmp_path: Path, default: str) -> None:
    begin = f"""
        import multiprocessing
        multiprocessing.set_start_method({default!r}, force=True)
    """
    print_length = "print(len(list(ringloader.DataLoader(dataset, num_workers=2{}))))"
    forked = _run(tmp_path, "fork", print_length.format(", **context"), begin)
    assert forked.stdout.split() == ["8", "left"], forked
    guarded = f'if __name__ == "__main__":\n    {print_length.format("")}'
    ended = _run(tmp_path, default, guarded, begin)
    assert "8" in ended.stdout.split(), ended
    assert ended.stderr == ""


def test_a_worker_that_ends_for_want_of_the_guard_runs_exit_functions(tmp_path: Path) -> None:
    ended = _run(tmp_path, "spawn", PROGRAMS["in a function"][0])
    assert ended.stdout.split() == ["left", "left"]
