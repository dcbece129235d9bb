"""A program: loaders of a process in which the system refuses one call, as sandboxes do.

A seccomp filter refuses it, before ringloader is imported, and stays in all processes that the loader starts.
Reads a list of cases as JSON, and prints an outcome for each.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

# Of x86_64.
NUMBERS = {
    "read": 0,
    "poll": 7,
    "lseek": 8,
    "mprotect": 10,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "ioctl": 16,
    "access": 21,
    "sched_yield": 24,
    "madvise": 28,
    "setitimer": 38,
    "getpid": 39,
    "sendto": 44,
    "recvfrom": 45,
    "sendmsg": 46,
    "recvmsg": 47,
    "socketpair": 53,
    "setsockopt": 54,
    "getsockopt": 55,
    "kill": 62,
    "uname": 63,
    "fcntl": 72,
    "ftruncate": 77,
    "readlink": 89,
    "sysinfo": 99,
    "getppid": 110,
    "sigaltstack": 131,
    "getpriority": 140,
    "sched_getparam": 143,
    "sched_getscheduler": 145,
    "mlock": 149,
    "prctl": 157,
    "gettid": 186,
    "sched_setaffinity": 203,
    "sched_getaffinity": 204,
    "timer_create": 222,
    "timer_settime": 223,
    "timer_delete": 226,
    "clock_nanosleep": 230,
    "epoll_wait": 232,
    "epoll_ctl": 233,
    "mbind": 237,
    "get_mempolicy": 239,
    "waitid": 247,
    "ioprio_get": 252,
    "newfstatat": 262,
    "ppoll": 271,
    "unshare": 272,
    "set_robust_list": 273,
    "epoll_pwait": 281,
    "fallocate": 285,
    "eventfd2": 290,
    "epoll_create1": 291,
    "pipe2": 293,
    "prlimit64": 302,
    "getcpu": 309,
    "process_vm_readv": 310,
    "getrandom": 318,
    "memfd_create": 319,
    "membarrier": 324,
    "statx": 332,
    "rseq": 334,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
    "clone3": 435,
    "close_range": 436,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "epoll_pwait2": 441,
}
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
# Of classic BPF: load a word, jump if equal, return.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_OF_ARGUMENTS = 16


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def refuse(number: int, error: int, argument: tuple[int, int] | None = None) -> None:
    """Has this process and its children get ``error`` of a system call, or of it with this argument."""
    steps = [(_LOAD, 0, 0, 0)]
    if argument is None:
        steps += [(_JUMP_EQUAL, 0, 1, number)]
    else:
        steps += [
            (_JUMP_EQUAL, 0, 3, number),
            (_LOAD, 0, 0, _OFFSET_OF_ARGUMENTS + 8 * argument[0]),
            (_JUMP_EQUAL, 0, 1, argument[1]),
        ]
    steps += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), instructions)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


class Values(Dataset[Any]):
    """Samples that fill a slot, and some that are copied."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            # So that both sides sleep.
            time.sleep(0.05)
        return torch.full((100, 300), index), index, np.ones(40) * index, str(index)


def _digest(batches: list[Any]) -> str:
    words = hashlib.sha256()
    for tensor, numbers, array, texts in batches:
        words.update(tensor.numpy().tobytes() + numbers.numpy().tobytes() + array.numpy().tobytes())
        words.update(repr(texts).encode())
    return words.hexdigest()


def _outcome(case: dict[str, Any]) -> dict[str, Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringloader").addHandler(handler)
    argument = case.get("argument")
    refuse(
        NUMBERS[case["call"]], getattr(errno, case["errno"]), None if argument is None else tuple(argument)
    )
    options = dict(case["options"])
    if case["loader"] == "torch":
        loader: Any = torch.utils.data.DataLoader(Values(), batch_size=3, num_workers=2, **options)
    else:
        import ringloader

        if options.pop("worker_pool", False):
            options["worker_pool"] = ringloader.WorkerPool(2)
        loader = ringloader.DataLoader(Values(), batch_size=3, num_workers=2, **options)
    digests = [_digest(list(loader)) for _ in range(2)]
    found: dict[str, Any] = {"digests": digests, "said": said}
    if case["loader"] != "torch":
        report = ringloader.report(loader)
        found |= {"path": report.path, "reason": report.reason}
    del loader
    return found


def _in_child(case: dict[str, Any], limit: float) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        try:
            answer = _outcome(case)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            answer = {"failed": text, "traceback": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], limit)
        text = os.read(reading, 1 << 16) if ready else b""
    finally:
        os.close(reading)
        # Whatever it has started, too.
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    return {"failed": "died" if ready else f"nothing came in {limit} seconds"}


def main() -> None:
    """Forks a child for each case: here ringloader must not be imported, and nothing be refused."""
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    for case in json.loads(sys.stdin.read()):
        print(json.dumps({"case": case, **_in_child(case, float(sys.argv[1]))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
