"""``worker_concurrency``: errors of samples, their handling, limits of time, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from faults.proc import wait_until
from ringloader import DataLoader, Retry

pytestmark = pytest.mark.rings_only

KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "here": {},
}


class Failing(Dataset[int]):
    """Some samples raise, the later ones of a batch first."""

    def __init__(self, bad: tuple[int, ...], length: int = 24) -> None:
        self.bad, self.length = bad, length

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.02 - 0.002 * (index % 6))
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


class PlainFailing(Failing):
    """The same with a plain method."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        time.sleep(0.02 - 0.002 * (index % 6))
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


def outcomes(loader: Any) -> list[Any]:
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except ValueError as error:
            found.append(str(error).strip().splitlines()[-1].removeprefix("ValueError: "))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Failing, PlainFailing])
def test_the_first_bad_sample_in_order_is_the_error_and_later_batches_come(cls: Any, kind: str) -> None:
    dataset = cls((8, 10, 23))
    loader = DataLoader(dataset, batch_size=6, worker_concurrency=12, **KINDS[kind])
    expected = [list(range(6)), "sample 8 is bad", list(range(12, 18)), "sample 23 is bad"]
    assert outcomes(loader) == expected


def test_the_error_has_the_traceback_of_the_sample() -> None:
    loader = DataLoader(Failing((2,)), batch_size=6, num_workers=1, worker_concurrency=6)
    with pytest.raises(ValueError, match=r"(?s)DataLoader worker process 0.*in __getitem__.*sample 2 is bad"):
        next(iter(loader))


class Cancelled(Dataset[int]):
    """Notes in a file which samples were cancelled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        try:
            await asyncio.sleep(0.01 if index in (0, 1) or index > 3 else 30)
        except asyncio.CancelledError:
            with self.path.open("a") as file:
                file.write(f"{index} ")
            raise
        if index == 1:
            raise ValueError("sample 1 is bad")
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_coroutines_of_a_bad_batch_are_cancelled(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cancelled"
    loader = DataLoader(Cancelled(path), batch_size=4, worker_concurrency=4, **KINDS[kind])
    begun = time.perf_counter()
    assert outcomes(loader) == ["sample 1 is bad", [4, 5, 6, 7]]
    assert time.perf_counter() - begun < 20
    assert wait_until(lambda: path.exists() and sorted(path.read_text().split()) == ["2", "3"], 20)


class Raising(Dataset[int]):
    """Sample 3 raises what is no ``Exception``, or is one of the interpreter's own."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index


def test_a_coroutine_that_cancels_itself_is_an_error_of_its_batch() -> None:
    loader = DataLoader(Raising(asyncio.CancelledError), batch_size=2, num_workers=1, worker_concurrency=4)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="the coroutine of a sample was cancelled"):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]


def test_the_exit_of_a_sample_ends_its_worker_as_torchs() -> None:
    loader = DataLoader(Raising(SystemExit), batch_size=2, num_workers=1, worker_concurrency=4)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)


class Flaky(Dataset[int]):
    """Each sample fails until it was asked for ``times`` times more."""

    def __init__(self, times: int, path: Path, length: int = 16) -> None:
        self.times, self.path, self.length = times, path, length

    def __len__(self) -> int:
        return self.length

    def _count(self, index: int) -> int:
        with (self.path / str(index)).open("a") as file:
            file.write(".")
            return file.tell()

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.001)
        if self._count(index) <= self.times:
            raise ValueError(f"sample {index} is bad")
        return index


class PlainFlaky(Flaky):
    """The same with a plain method."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if self._count(index) <= self.times:
            raise ValueError(f"sample {index} is bad")
        return index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Flaky, PlainFlaky])
def test_samples_are_asked_for_again_on_their_lines(cls: Any, kind: str, tmp_path: Path) -> None:
    loader = DataLoader(
        cls(2, tmp_path), batch_size=16, worker_concurrency=16, on_error=Retry(3, backoff=0.2), **KINDS[kind]
    )
    begun = time.perf_counter()
    assert outcomes(loader) == [list(range(16))]
    # One after the other they pause for 9.6 s.
    assert time.perf_counter() - begun < 6
    assert [(bad.index, bad.handling) for bad in loader.errors] == [(at, "retried") for at in range(16)]
    assert {len((tmp_path / str(at)).read_text()) for at in range(16)} == {3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Failing, PlainFailing])
def test_bad_samples_are_left_out_or_replaced(cls: Any, kind: str) -> None:
    given = {"batch_size": 6, "worker_concurrency": 12, **KINDS[kind]}
    loader = DataLoader(cls((8, 10)), on_error="skip", **given)
    assert outcomes(loader)[1] == [6, 7, 9, 11]
    assert [(bad.index, bad.handling) for bad in loader.errors] == [(8, "skipped"), (10, "skipped")]
    loader = DataLoader(cls((8, 10)), on_error=_negative, **given)
    assert outcomes(loader)[1] == [6, 7, -8, 9, -10, 11]
    loader = DataLoader(cls((8, 10)), on_error="skip", max_errors=1, **given)
    assert "sample 10 is bad" in str(outcomes(loader)[1])


def _negative(index: int, _error: Exception) -> int:
    return -index


class Hanging(Dataset[int]):
    """One sample does not come. Notes that its ``finally`` has run."""

    def __init__(self, path: Path, bad: int = 5) -> None:
        self.path, self.bad = path, bad

    def __len__(self) -> int:
        return 12

    async def __getitem__(self, index: int) -> int:
        try:
            await asyncio.sleep(60 if index == self.bad else 0.01)
        finally:
            if index == self.bad:
                self.path.write_text(str(os.getpid()))
        return os.getpid()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_coroutine_that_takes_too_long_is_cancelled_and_the_process_lives_on(
    workers: int, tmp_path: Path
) -> None:
    path = tmp_path / "ended"
    loader = DataLoader(
        Hanging(path), batch_size=4, num_workers=workers, worker_concurrency=4, sample_timeout=0.5
    )
    iterator = iter(loader)
    pids = set(next(iterator).tolist())
    with pytest.raises(TimeoutError, match=r"sample at index 5 took longer than sample_timeout=0.5 s"):
        next(iterator)
    assert {int(path.read_text())} == pids == set(next(iterator).tolist())


class HangingPlain(Hanging):
    """The same with a plain method."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        time.sleep(60 if index == self.bad else 0.01)
        return index


def test_a_thread_that_hangs_costs_the_process(tmp_path: Path) -> None:
    loader = DataLoader(
        HangingPlain(tmp_path / "never"),
        batch_size=4,
        num_workers=1,
        worker_concurrency=4,
        sample_timeout=1.0,
        on_error="skip",
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    assert [type(bad.error) for bad in loader.errors] == [TimeoutError]


class Crashing(Dataset[int]):
    """One sample ends its process, the first time."""

    def __init__(self, path: Path, always: bool) -> None:
        self.path, self.always = path, always

    def __len__(self) -> int:
        return 16

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.005)
        if index == 6 and (self.always or not self.path.exists()):
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_worker_is_restarted_and_no_batch_is_lost(tmp_path: Path) -> None:
    dataset = Crashing(tmp_path / "crashed", always=False)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, worker_concurrency=8, restart_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(16))


def test_a_sample_that_crashes_its_worker_is_found(tmp_path: Path) -> None:
    dataset = Crashing(tmp_path / "crashed", always=True)
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, worker_concurrency=8, restart_workers=8, on_error="skip"
    )
    assert torch.cat(list(loader)).tolist() == [at for at in range(16) if at != 6]
    assert [bad.index for bad in loader.errors] == [6]


PROGRAM = """
import asyncio, os, signal, sys, threading, time
import torch
import ringloader


class Sessions(torch.utils.data.Dataset):
    generator = None

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 64

    async def numbers(self):
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.01)
            os.write(1, b"generator closed\\n")

    async def __getitem__(self, index):
        if self.generator is None:
            self.generator = self.numbers()
            await anext(self.generator)
        try:
            await asyncio.sleep(self.seconds if index >= 8 else 0.01)
        except asyncio.CancelledError:
            os.write(1, b"cancelled\\n")
            raise
        return index

    async def aclose(self):
        # Longer than a plain worker would have after the main process was killed.
        await asyncio.sleep(0.6)
        os.write(1, b"closed\\n")


KIND = dict(batch_size=4, worker_concurrency=8, **KINDS)
"""
BEGIN = """
loader = ringloader.DataLoader(Sessions(60), **KIND)
iterator = iter(loader)
next(iterator)
"""
ENDS = {
    "epoch": "list(ringloader.DataLoader(Sessions(0.01), **KIND))",
    "broken off": "for batch in ringloader.DataLoader(Sessions(60), **KIND):\n    break",
    "shutdown": f"{BEGIN}loader.shutdown()\nprint('after', flush=True)",
    "program": BEGIN,
    "interrupt": (
        f"{BEGIN}threading.Timer(1.0, os.killpg, (0, signal.SIGINT)).start()\ntry:\n    list(iterator)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\ndel loader, iterator"
    ),
    "killed": f"{BEGIN}os.kill(os.getpid(), signal.SIGKILL)",
}
WAYS: dict[str, dict[str, Any]] = {
    **KINDS,
    "fork server": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "shared batches": {"num_workers": 2, "worker_task": "sample"},
}
WAYS_IN_WORDS = {name: repr(way) for name, way in WAYS.items()} | {
    "pool": "{'worker_pool': ringloader.WorkerPool(2)}"
}


def processes_of(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


CASES = [(end, kind) for kind in KINDS for end in ENDS]
CASES += [(end, kind) for kind in ("fork server", "shared batches", "pool") for end in ("program", "killed")]


@pytest.mark.parametrize(("end", "kind"), CASES)
def test_nothing_is_left_at_the_end_and_nothing_complains(end: str, kind: str, tmp_path: Path) -> None:
    main = textwrap.indent(ENDS[end], "    ")
    path = tmp_path / "program.py"
    path.write_text(f"{PROGRAM.replace('KINDS', WAYS_IN_WORDS[kind])}\nif __name__ == '__main__':\n{main}\n")
    program = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = program.communicate(timeout=150)
    lines = out.split("\n")
    are_processes = kind not in ("threads", "here")
    assert err == ""
    # Nobody is left to close anything where the program itself makes the samples and dies.
    if end != "killed" or are_processes:
        workers = 2 if are_processes else 1
        assert lines.count("closed") == workers
        # A worker may have made no sample of a batch that all of them share.
        assert lines.count("generator closed") in range(
            workers if kind != "shared batches" else 0, workers + 1
        )
    if end == "shutdown":
        assert lines.index("after") > lines.index("closed")
    if end not in ("epoch", "killed", "program") and kind != "here":
        assert "cancelled" in lines
    until = time.monotonic() + 5
    while processes_of(program.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(program.pid) == []
