"""``doctor()``: it finds what is there, and says what follows."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
from typing import NoReturn

import pytest
import torch
import torch.utils.data

import ringloader
from programs import client
from ringloader import _log
from ringloader._tools import doctor

pytestmark = pytest.mark.rings_only


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    return client.run(arguments, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finding(subject: str, found: ringloader.Diagnosis) -> ringloader.Finding:
    (one,) = [one for one in found.findings if one.subject.startswith(subject)]
    return one


def test_the_test_loader_runs_on_the_native_path_and_draws_nothing() -> None:
    before = torch.get_rng_state(), random.getstate()
    found = ringloader.doctor()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert finding("path", found).value == "native"
    rate = finding("test loader", found)
    assert rate.verdict == "ok"
    assert "on path native" in rate.value
    assert found.problems == ()


def test_without_the_rate_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    found = ringloader.doctor(rate=False)
    assert [one for one in found.findings if "test loader" in one.subject] == []


def test_every_finding_is_printed_with_what_follows() -> None:
    found = ringloader.Diagnosis(
        (
            ringloader.Finding("one", "1"),
            ringloader.Finding("another", "2", "problem", "word " * 40),
        )
    )
    text = str(found).splitlines()
    assert text[:2] == ["one      1", "another  2"]
    assert text[2].startswith("         problem: word")
    assert all(len(line) <= 100 for line in text)
    assert " ".join(text).count("word") == 40
    assert [one.subject for one in found.problems] == ["another"]


def test_a_replaced_iterator_is_a_problem_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replacement(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
        pass

    monkeypatch.setattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", Replacement)
    path = finding("path", ringloader.Diagnosis(tuple(doctor.findings())))
    assert (path.value, path.verdict) == ("torch", "problem")
    assert "_MultiProcessingDataLoaderIter was replaced" in path.meaning


def test_a_system_that_takes_no_shared_memory_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shared memory" not in {one.subject for one in doctor.findings()}
    monkeypatch.setattr(doctor._native, "takes_shared_memory_back", lambda: False)
    found = {one.subject: one for one in doctor.findings()}["shared memory"]
    assert found.verdict == "note" and "gVisor" in found.meaning


def test_few_descriptors_are_said_with_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    limit = opened + 100
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, 4096))
    files = finding("open files", ringloader.Diagnosis(tuple(doctor.findings())))
    # The list of descriptors has one of its own.
    assert files.value in [
        f"{found} of {limit}: room for about {(limit - found) // 5} workers" for found in (opened, opened + 1)
    ]
    assert "raised to 4096" in files.meaning


def test_no_room_for_a_worker_is_a_problem() -> None:
    program = (
        "import os, resource, ringloader\n"
        "from ringloader._tools import doctor\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 3,) * 2)\n"
        "print([one.verdict for one in doctor.findings() if one.subject == 'open files'])\n"
    )
    ran = ended("-c", program)
    assert (ran.stdout, ran.stderr) == ("['problem']\n", "")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64, "this process keeps its own"


def test_while_installed_torchs_rate_is_torchs() -> None:
    with ringloader.installed():
        found = ringloader.doctor()
    assert found.problems == ()


def test_the_command_prints_it_and_says_whether_something_is_wrong() -> None:
    command = [sys.executable, "-m", "ringloader", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    subjects = [line.split("  ")[0] for line in ran.stdout.splitlines() if not line.startswith(" ")]
    assert {"ringloader", "torch", "path", "memory", "test loader, 2 workers"} <= set(subjects)
    program = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "sys.argv = ['ringloader', 'doctor']\n"
        "runpy.run_module('ringloader', run_name='__main__', alter_sys=True)\n"
    )
    limited = ended("-c", program)
    assert limited.returncode == 1, limited.stdout + limited.stderr
    assert "problem: ringloader's loader with workers does not run here." in limited.stdout


def test_torchs_loader_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's queues need semaphores, which a container without a writable /dev/shm has not."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    found = ringloader.doctor()
    rate = finding("test loader", found)
    assert (rate.verdict, rate.meaning) == ("ok", "")
    assert "batches of 1 KiB a second on path native" in rate.value
    assert rate.value.endswith("; torch's: OSError: [Errno 30] Read-only file system")
    assert found.problems == ()


def test_a_default_device_of_the_program_is_not_the_machines() -> None:
    with torch.device("meta"):
        found = ringloader.doctor()
        assert torch.empty(()).is_meta
    assert finding("test loader", found).verdict == "ok"


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.accelerator.is_available", fail)
    monkeypatch.setattr("torch.utils.data.DataLoader.__init__", fail)
    found = ringloader.Diagnosis(tuple(doctor.findings()))
    for subject in ("accelerator", "path"):
        failed = finding(subject, found)
        assert (failed.value, failed.verdict) == ("RuntimeError: no driver", "problem")


def test_ours_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(doctor.DataLoader):
        def __iter__(self) -> NoReturn:
            raise RuntimeError("not today")

    monkeypatch.setattr(doctor, "DataLoader", Failing)
    rate = finding("test loader", ringloader.doctor())
    assert rate.verdict == "problem"
    assert re.fullmatch(r"RuntimeError: not today; torch's: \d+", rate.value)
    assert "RINGLOADER=off" in rate.meaning


def test_what_the_terminal_cannot_show_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
        _log.write("\u00e9 \udcff\n")
        sys.stdout.seek(0)
        assert sys.stdout.read() == "\\xe9 \\udcff\n"
    _log.write("\u00e9")
    assert capsys.readouterr().out == "\u00e9"


def test_without_a_standard_output_nothing_is_printed() -> None:
    ran = subprocess.run(
        ["bash", "-c", 'exec "$0" -m ringloader --version >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_what_is_found_is_not_printed_without_a_standard_output(words: list[str]) -> None:
    program = (
        "import os, runpy, sys\n"
        "os.close(1)\n"
        # As Python begins without it.
        "sys.stdout = sys.__stdout__ = None\n"
        f"sys.argv = ['ringloader', *{words}]\n"
        "runpy.run_module('ringloader', run_name='__main__', alter_sys=True)\n"
    )
    ran = ended("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_as_json_it_is_the_same() -> None:
    ran = ended("-m", "ringloader", "doctor", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)["findings"]
    assert [set(one) for one in told] == [{"subject", "value", "verdict", "meaning"}] * len(told)
    here = {one.subject: dataclasses.asdict(one) for one in doctor.findings()}
    assert {one["subject"]: one for one in told if one["subject"] in ("ringloader", "python", "torch")} == {
        name: here[name] for name in ("ringloader", "python", "torch")
    }
