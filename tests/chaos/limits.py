"""Too few descriptors, too little memory, too small a /dev/shm: it works, or an error says what is short."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import tempfile

import torch

from chaos.case import Program, Skip, case, must
from chaos.data import Numbers, check, check_all


def _lower(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


class Many(Numbers):
    """A hundred tensors in each sample."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.full((50,), index + number) for number in range(100)]


@case(fast=True)
def nofile_64_and_100_tensors(program: Program) -> None:
    """`ulimit -n 64` and batches of 100 tensors, ten of them held: they come."""
    _lower(resource.RLIMIT_NOFILE, 64)
    held = []
    for number, batch in enumerate(program.loader(Many(40), batch_size=None, num_workers=2)):
        must(all(int(part[0]) == number + at for at, part in enumerate(batch)), f"batch {number} is wrong")
        held = [*held[-9:], batch]


@case()
def nofile_1024_and_2000_held_tensors(program: Program) -> None:
    """`ulimit -n 1024`, and all of 2,000 batches are held: they come, and keep their bytes."""
    _lower(resource.RLIMIT_NOFILE, 1024)
    held = list(program.loader(Numbers(2000, 100), num_workers=2))
    for number, batch in enumerate(held):
        check(batch, number)


@case(limit=90)
def nofile_600_and_64_workers(program: Program) -> None:
    """`ulimit -n 600`, and two loaders of 32 persistent workers each, as 1,024 for 64 each: both run."""
    _lower(resource.RLIMIT_NOFILE, 600)
    loaders = [program.loader(Numbers(64, 10), num_workers=32, persistent_workers=True) for _ in range(2)]
    for _ in range(2):
        for loader in loaders:
            check_all(loader, 64)


@case(limit=60)
def nofile_too_low_to_start(program: Program) -> None:
    """`ulimit -n 24` and eight workers: an error, and nothing is left."""
    _lower(resource.RLIMIT_NOFILE, 24)
    with program.raises((OSError, RuntimeError), "(?i)open files|descriptor", seconds=20):
        list(program.loader(Numbers(100), num_workers=8))


def _small_shm(size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:
        raise Skip("no mount namespace can be made")
    for words in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "x", "/dev/shm"],
    ):
        if subprocess.run(words, capture_output=True).returncode != 0:
            raise Skip("nothing can be mounted")


@case(fast=True)
def dev_shm_of_64_kib(program: Program) -> None:
    """A /dev/shm of 64 KiB, as containers have, and batches of 1 MiB: they come."""
    _small_shm("64k")
    check_all(program.loader(Numbers(30, 131_072), num_workers=2), 30)


@case()
def dev_shm_is_missing(program: Program) -> None:
    """An empty /dev/shm of no size that nobody may write: small batches come."""
    _small_shm("4k")
    check_all(program.loader(Numbers(30, 20_000), num_workers=2), 30)


@case(known=("leftover", "as torch, whose transport it falls back to"))
def file_size_limit(program: Program) -> None:
    """`ulimit -f` of 1 MiB and batches of 4 MiB: they come, or an error says so in time."""
    _lower(resource.RLIMIT_FSIZE, 1 << 20)
    try:
        with program.within(20):
            check_all(program.loader(Numbers(10, 524_288), num_workers=2), 10)
    except (OSError, RuntimeError, MemoryError) as error:
        must(str(error), "an error without a text")


class Hungry(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
            return torch.zeros(1 << 28)
        return super().__getitem__(index)


@case()
def worker_without_memory(program: Program) -> None:
    """A worker's address space is used up in a sample: an error, in seconds."""
    with program.raises((RuntimeError, MemoryError), seconds=15):
        list(program.loader(Hungry(20), num_workers=2))


@case()
def address_space_limit(program: Program) -> None:
    """`ulimit -v` of 300 MB above what is used: 300 batches of 1 MB come."""
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
    _lower(resource.RLIMIT_AS, size + (300 << 20))
    check_all(program.loader(Numbers(300, 131_072), num_workers=2), 300)


@case()
def no_locked_memory(program: Program) -> None:
    """`ulimit -l 0`: an epoch comes."""
    _lower(resource.RLIMIT_MEMLOCK, 0)
    check_all(program.loader(Numbers(30), num_workers=2), 30)


@case()
def closed_standard_streams(program: Program) -> None:
    """Descriptors 0, 1 and 2 are closed before the start: each byte is right."""
    for number in range(3):
        os.close(number)
    check_all(program.loader(Numbers(30, 50_000), num_workers=2), 30)


@case()
def working_folder_is_gone(program: Program) -> None:
    """The program's working folder was removed: an epoch comes."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # noqa: PTH106
    check_all(program.loader(Numbers(30), num_workers=2), 30)


@case(methods=("fork", "spawn"))
def temporary_folder_is_missing(program: Program) -> None:
    """TMPDIR names a folder that is not there: an epoch comes."""
    os.environ["TMPDIR"] = "/nowhere"
    check_all(program.loader(Numbers(30), num_workers=2), 30)


@case()
def other_umask(program: Program) -> None:
    """With `umask 0777` an epoch comes."""
    os.umask(0o777)
    check_all(program.loader(Numbers(30), num_workers=2), 30)


@case(limit=60)
def many_workers(program: Program) -> None:
    """64 workers and 10 samples: they come, and all is gone within seconds."""
    with program.within(40):
        check_all(program.loader(Numbers(10), num_workers=64), 10)
