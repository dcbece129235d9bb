"""The measurements of ``num_workers="auto"``, and the bounds of the number."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringloader._features.auto import auto_workers, measuring
from ringloader._features.auto.measuring import Meter

pytestmark = pytest.mark.rings_only


@pytest.mark.parametrize(
    ("cores", "ranks", "bound", "most"),
    [
        *((1, 1, 1, 4), (2, 1, 2, 8), (3, 1, 2, 8), (8, 1, 7, 28), (8, 2, 3, 12), (2, 2, 1, 4), (2, 8, 1, 4)),
        *((64, 1, 63, 64), (192, 1, 191, 191)),
    ],
)
def test_the_bounds(cores: int, ranks: int, bound: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert auto_workers.bound() == bound
    assert auto_workers.most() == most


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "child",
    ["import time; print(flush=True); time.sleep(99)", "print(flush=True)\nwhile True: pass"],
    indirect=True,
    ids=["waits", "runs"],
)
def test_a_worker_that_is_ready_does_not_wait(child: int, request: pytest.FixtureRequest) -> None:
    """However busy the machine is: the time for which it ran or was ready is no wait."""
    meter = Meter([child], 1.0)
    time.sleep(0.5)
    look = meter.look([child], 1.25, 10)
    assert look.batches == 10
    assert look.waited == 0.25
    assert look.seconds >= 0.5
    if "waits" in request.node.name:
        assert look.waiting > 0.9
        assert look.running < 0.1
    else:
        assert look.waiting < 1e-9
        assert look.running > 0
    again = meter.look([child], 1.25, 0)
    assert again.waited == 0


KEPT_OUT = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while True:
    pass
"""


@pytest.mark.parametrize("child", [KEPT_OUT], indirect=True, ids=["kept out"])
def test_a_worker_that_is_kept_from_a_processor_does_not_wait(child: int) -> None:
    """The system counts the time for which it is ready only when it gets the processor."""
    core = min(os.sched_getaffinity(0))
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for pid in (hog.pid, child):
            os.sched_setaffinity(pid, {core})
        for _ in range(20):
            meter = Meter([child], 0.0)
            time.sleep(0.02)
            assert meter.look([child], 0.0, 1).waiting < 1e-9
    finally:
        hog.kill()
        hog.communicate()


def test_the_worker_that_was_busy_least_often_counts() -> None:
    meter = Meter([], 0.0)
    for unanswered in ([2, 1, 0], [1, 0, 0], [2, 0, 0], [1, 1, 0]):
        meter.note_tasks(unanswered)
    own = os.getpid()
    assert meter.look([own, own], 0.0, 4).busy == 0.5
    assert meter.look([own], 0.0, 4).busy == 1.0


def test_a_process_that_has_ended_is_left_out() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    meter = Meter([process.pid], 0.0)
    process.wait()
    look = meter.look([process.pid], 0.0, 1)
    assert (look.running, look.waiting) == (0.0, 0.0)


def test_the_memory_that_is_a_workers_own() -> None:
    own = measuring.own_memory(os.getpid())
    # The heap may have pages that are free.
    block = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(os.urandom(1 << 20) * 32)
    assert measuring.own_memory(os.getpid()) - own > 24 << 20
    block.close()
    pids = [os.getpid()]
    assert measuring.has_memory(pids, available=1 << 50)
    assert not measuring.has_memory(pids, available=own)
    assert measuring.has_memory(pids, 1, available=4 * own)
    assert not measuring.has_memory(pids, 4, available=4 * own)
    # Nothing is known of a process that has ended.
    assert measuring.own_memory(1 << 30) == 0


@pytest.mark.parametrize(
    ("stat", "seconds"),
    [
        ("nr_periods 3\nnr_throttled 2\nthrottled_usec 2500000\n", 2.5),
        ("nr_periods 3\nthrottled_time 1500000000\n", 1.5),
        ("usage_usec 4\n", 0.0),
    ],
)
def test_the_time_of_a_group_that_may_not_run(stat: str, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    )
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job/cpu.stat").write_text(stat)
    assert measuring.throttled(tmp_path) == seconds
    assert measuring.throttled(tmp_path / "none") == 0.0


@pytest.mark.parametrize(("niceness", "seconds"), [(0, 9.0), (-5, 9.0), (5, 4.0)])
def test_programs_of_a_low_priority_leave_processors_idle(
    niceness: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a program of the usual priority: fields are user, nice, system, idle, and waiting for devices."""
    monkeypatch.setattr(measuring, "_TICK", 0.01)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 12})
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(
        "cpu  9 9 9 9 9 9\ncpu1 7000 400 100 200 50 9\ncpu2 1 1 1 99999 1 1\ncpu12 1 100 1 100 50 1\nintr 5\n"
    )
    assert measuring.idle(tmp_path) == pytest.approx(seconds)
    assert measuring.idle(tmp_path / "none") == 0.0
