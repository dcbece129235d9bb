"""The number of cores: affinity, and the quotas of control groups, which a pod has."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.proc import wait_until
from programs import client
from ringloader._features import cores
from ringloader._tools import doctor

pytestmark = pytest.mark.rings_only

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
LEGACY = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)


def system(root: Path, own: str, mounts: str, **quotas: str) -> Path:
    """Makes the files of a system, each quota in a group, with ``/`` as ``__`` and the root as ``top``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text(mounts)
    for group, quota in quotas.items():
        at = root / "sys/fs/cgroup" / ("cpu,cpuacct" if mounts == LEGACY else "")
        at = at if group == "top" else at / group.replace("__", "/")
        at.mkdir(parents=True, exist_ok=True)
        if mounts == LEGACY:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            for name, figure in zip(names, quota.split(), strict=True):
                (at / name).write_text(figure + "\n")
        else:
            (at / "cpu.max").write_text(quota + "\n")
    return root


@pytest.mark.parametrize(
    ("own", "mounts", "quotas", "found"),
    [
        ("0::/pod/one\n", UNIFIED, {"pod__one": "150000 100000"}, 1.5),
        ("0::/pod/one\n", UNIFIED, {"pod__one": "max 100000"}, None),
        ("0::/pod/one\n", UNIFIED, {"pod__one": "max 100000", "pod": "200000 100000"}, 2),
        ("0::/pod/one\n", UNIFIED, {"pod__one": "50000 100000", "pod": "200000 100000"}, 0.5),
        ("0::/\n", UNIFIED, {"top": "400000 100000"}, 4),
        # The path is the host's.
        ("0::/kubepods/pod/one\n", UNIFIED, {"top": "300000 100000"}, 3),
        ("0::/kubepods/one\n", UNIFIED.replace(" / ", " /kubepods/one ", 1), {"top": "300000 100000"}, 3),
        ("0::/kube/one/a\n", UNIFIED.replace(" / ", " /kube/one ", 1), {"a": "100000 50000"}, 2),
        ("4:cpu,cpuacct:/pod\n3:cpuset:/\n0::/\n", LEGACY, {"pod": "250000 100000"}, 2.5),
        ("4:cpu,cpuacct:/pod\n", LEGACY, {"pod": "-1 100000"}, None),
        ("4:cpu,cpuacct:/a/b\n", LEGACY, {"a": "100000 100000", "a__b": "-1 100000"}, 1),
        ("3:cpuset:/pod\n", LEGACY, {"pod": "250000 100000"}, None),
        ("", UNIFIED, {"top": "400000 100000"}, None),
        ("0::/\n", "", {"top": "400000 100000"}, None),
        ("0::/\n", UNIFIED, {"top": "what"}, None),
        ("0::/\n", UNIFIED, {"top": ""}, None),
        ("0::/\n", UNIFIED, {"top": "100000 0"}, None),
        ("no line\n\n:\n", "no line\n\n - \n", {}, None),
    ],
)
def test_the_least_quota_of_the_groups_counts(own, mounts, quotas, found, tmp_path) -> None:
    assert cores.cpu_quota(system(tmp_path, own, mounts, **quotas)) == found


def test_a_mount_may_have_a_name_with_a_space(tmp_path) -> None:
    system(tmp_path, "0::/\n", UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/a\\040b"), **{"a b": "2 1"})
    assert cores.cpu_quota(tmp_path) == 2


def test_without_proc_there_is_no_quota(tmp_path) -> None:
    assert cores.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("affinity", "quota", "found"),
    [(64, None, 64), (64, 2, 2), (64, 1.5, 2), (64, 0.1, 1), (2, 16, 2), (3, 2.5, 3)],
)
def test_the_least_of_affinity_and_quota_counts_rounded_up(affinity, quota, found, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.cores() == found


@pytest.mark.parametrize("known", [5, None])
def test_a_system_without_affinity_has_the_cores_of_the_machine(known, monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "process_cpu_count", lambda: known, raising=False)
    assert cores.cores() == (known or 1)
    monkeypatch.delattr(os, "process_cpu_count")
    monkeypatch.setattr(os, "cpu_count", lambda: known)
    assert cores.cores() == (known or 1)


def test_doctor_says_that_a_quota_is_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 1.5)
    found = doctor._cores()
    assert found.value == "2 of 64"
    assert "may use 2 of them (the CPU quota of its control group is 1.5)" in found.meaning
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    found = doctor._cores()
    assert found.value == "1 of 64"
    assert "quota" not in found.meaning


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group with a quota of half a processor."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")):
        made = root / f"ringloader-cores-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if (made / "cpu.cfs_quota_us").exists():
                (made / "cpu.cfs_quota_us").write_text("50000")
            else:
                (made / "cpu.max").write_text("50000 100000")
        except OSError:
            made.rmdir()
            continue
        yield made
        assert wait_until(lambda made=made: _removed(made), 10)
        return
    pytest.skip("no control group with a quota can be made here")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.skipif(cores.cores() < 2, reason="there is one core")
def test_a_quota_bounds_a_process_of_its_group_and_torchs_warning_is_torchs(half_a_core) -> None:
    program = f"""
import warnings
from pathlib import Path
import ringloader
from ringloader._features.cores import cores
from ringloader._tools import doctor
before = cores()
Path({str(half_a_core / "cgroup.procs")!r}).write_text("0")
warnings.simplefilter("error")
ringloader.DataLoader(range(4), num_workers=before)
print(cores(), doctor._cores().value.split()[0])
"""
    ended = client.run(["-c", program], timeout=50, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "1 1\n"
