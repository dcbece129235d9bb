"""Reach to a loader's memory: its own processes have it, and nobody else. SECURITY.md says so."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.proc import descendants, names_in_dev_shm
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only

METHODS = ["fork", "spawn", "forkserver"]
_F_GET_SEALS = 1034
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_SEAL, _F_SEAL_EXEC = 2, 4, 1, 32
_NOBODY = 65534
_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438


@contextlib.contextmanager
def at_work(method: str) -> Iterator[list[int]]:
    """The processes of a loader in mid-epoch, this one first; batches of it are held."""
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(64, 64)),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
        watchdog=60,
    )
    iterator: Any = iter(loader)
    # One of each worker: both have started.
    held = [next(iterator), next(iterator)]
    yield [os.getpid(), *(worker.pid for worker in iterator._workers)]
    assert [batch[0].shape for batch in held] == [(2, 64), (2, 64)]
    iterator._shutdown_workers()


def memfds(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("/memfd:ringloader"):
                found[int(entry.name)] = target
    return found


def flags(pid: int, fd: int) -> int:
    text = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("flags:")).split()[1], 8)


def names_of(pids: list[int]) -> set[str]:
    """Names of memory and of sockets that are ringloader's, or that say one of these processes."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = names_in_dev_shm() | {row[7] for row in rows if len(row) > 7}
    ours = ("ringloader", *(f"_{pid}_" for pid in pids))
    return {name for name in names if any(part in name for part in ours)}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_has_a_name(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Tests of torch's sharing by file names may have left some of this process.
    before = names_of([os.getpid()])
    with at_work(method) as pids:
        assert names_of(pids) == before
    assert list(tmp_path.iterdir()) == []
    # The check can fail: names that torch shares by say the process.
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix=f"torch_{os.getpid()}_"):
        assert names_of([os.getpid()]) != set()


@pytest.mark.parametrize("method", METHODS)
def test_every_descriptor_of_ours_closes_at_exec(method: str) -> None:
    with at_work(method) as pids:
        program = (
            "import os\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.readlink('/proc/self/fd/' + fd))\n"
            "    except OSError: pass\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program], close_fds=False, capture_output=True, text=True, check=True
        )
        assert "memfd:ringloader" not in ran.stdout
        for pid in pids:
            for fd, target in memfds(pid).items():
                assert flags(pid, fd) & os.O_CLOEXEC, (pid, target)


def test_shared_memory_is_sealed() -> None:
    """Nobody can shrink it under a reader, and nobody can take the seal off."""
    mapped = []
    with at_work("fork") as pids:
        for pid in pids:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped.append([line.split()[0] for line in lines if "/memfd:ringloader" in line])
        assert all(mapped), "each of them has mapped it"
        assert any("ringloader-watchdog" in target for target in memfds(pids[0]).values())
        for part in mapped[1]:
            # The descriptors are closed by now, so the mapping is opened, which only root may do.
            try:
                fd = os.open(f"/proc/{pids[1]}/map_files/{part}", os.O_RDWR)
            except PermissionError:
                pytest.skip("only root may open a mapping")
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            assert seals & (_F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL) == 7
            if tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 3):
                assert seals & _F_SEAL_EXEC, "it is no program"
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
            os.close(fd)


def as_nobody(attempt: Callable[[], None]) -> str:
    """Returns the end of ``attempt`` in a process of another user: the error's name, or "reached"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "reached"
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            attempt()
        except OSError as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 100).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("method", METHODS)
def test_another_user_reaches_nothing_through_proc(method: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def get_descriptor(pid: int) -> None:
        pidfd = libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
        if libc.syscall(_SYS_PIDFD_GETFD, pidfd, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")

    with at_work(method) as pids:
        server = [pid for pid in descendants() if pid not in pids]
        for pid in [*pids, *server]:
            attempts: list[Callable[[], object]] = [
                lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir()),  # type: ignore[misc]
                lambda pid=pid: os.open(f"/proc/{pid}/fd/0", os.O_RDONLY),  # type: ignore[misc]
                lambda pid=pid: list(Path(f"/proc/{pid}/map_files").iterdir()),  # type: ignore[misc]
                lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),  # type: ignore[misc]
                lambda pid=pid: get_descriptor(pid),  # type: ignore[misc]
            ]
            for attempt in attempts:
                assert as_nobody(lambda attempt=attempt: attempt() and None) == "PermissionError"  # type: ignore[misc]
    # The check can fail: another user reads what he may read.
    assert as_nobody(lambda: Path(f"/proc/{os.getpid()}/stat").read_text() and None) == "reached"
