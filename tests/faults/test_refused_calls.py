"""A system that refuses a call, as sandboxes do, costs no batch that torch's loader would give."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults import refused_calls

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86_64"),
]

# Further cases: a call with one of these arguments. They are the commands of fcntl (flags, owners, signals,
# seals), advice of madvise, options of prctl, limits of prlimit64, and FIONBIO.
ARGUMENTS = {
    "fcntl": [(1, command) for command in (1, 3, 4, 8, 10, 1033, 1034)],
    "madvise": [(2, advice) for advice in (4, 9, 14, 16, 18, 23)],
    "prctl": [(0, option) for option in (1, 15, 36, 37)],
    "prlimit64": [(1, limit) for limit in (7, 8, 9)],
    "ioctl": [(1, 0x5421)],
}
# Calls without which torch's loader waits forever.
NEEDED = {"fcntl"}
# Calls of a loader with other options, beside those.
OF_OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "watchdog": ({"watchdog": 5.0, "timeout": 60}, ["sigaltstack", "memfd_create", "prlimit64"]),
    "pool": ({"worker_pool": True}, ["sendto", "recvfrom", "setitimer", "socketpair", "ppoll"]),
    "main_prefetch": ({"main_prefetch": 2}, ["epoll_pwait", "epoll_wait", "eventfd2"]),
    "threads": ({"worker_method": "thread"}, ["ppoll", "epoll_wait", "eventfd2", "memfd_create", "prctl"]),
    "spawn": ({"multiprocessing_context": "spawn"}, ["recvfrom", "getpriority"]),
}


def cases(calls: list[str], **common: Any) -> list[dict[str, Any]]:
    """Makes a case for each of these calls, refused with both errors that sandboxes have."""
    return [
        {"call": call, "errno": errno, "argument": argument, **common}
        for call in calls
        for argument in [*([] if call in NEEDED else [None]), *ARGUMENTS.get(call, [])]
        for errno in ("EPERM", "ENOSYS")
    ]


def outcomes(asked: list[dict[str, Any]], limit: float = 60.0) -> Iterator[dict[str, Any]]:
    program = Path(refused_calls.__file__)
    ended = subprocess.run(
        [sys.executable, str(program), str(limit)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(asked)
    yield from found


def assert_no_worse_than_torch(asked: list[dict[str, Any]], path: str = "native") -> list[dict[str, Any]]:
    """Each gives the right batches, on that path or with a reason; or torch's loader fails too."""
    context = {key: value for key, value in asked[0]["options"].items() if key == "multiprocessing_context"}
    [plain] = outcomes([{"call": "getcpu", "errno": "EPERM", "loader": "torch", "options": context}])
    right = plain["digests"]
    assert right[0] == right[1]
    found = list(outcomes([{**case, "loader": "ringloader"} for case in asked]))
    failed = []
    for one in found:
        if one.get("digests") != right:
            failed.append(one)
        else:
            assert one["path"] == path or (one["path"] == "torch" and "is not available" in one["reason"]), (
                one
            )
    theirs = outcomes([{**one["case"], "loader": "torch", "options": context} for one in failed])
    worse = [one for one, torchs in zip(failed, theirs, strict=True) if torchs.get("digests") == right]
    assert worse == []
    return found


@pytest.mark.slow
@pytest.mark.limit(600)
def test_each_call_of_a_loader_whose_workers_fork():
    found = assert_no_worse_than_torch(cases(list(refused_calls.NUMBERS), options={}))
    # Calls that Python and torch do without.
    at_work = {one["case"]["call"] for one in found if one.get("path") == "native"}
    assert {"ppoll", "epoll_pwait", "prlimit64", "prctl", "madvise", "timer_create", "statx"} <= at_work
    # The filter is there: these are refused.
    without = {one["case"]["call"] for one in found if one.get("path") == "torch"}
    assert {"memfd_create", "eventfd2", "pidfd_open", "socketpair", "epoll_wait"} <= without


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", OF_OPTIONS)
def test_calls_of_a_loader_with_options(name):
    options, calls = OF_OPTIONS[name]
    asked = cases(calls, options=options)
    assert_no_worse_than_torch(asked, "threads" if name == "threads" else "native")


@pytest.mark.limit(300)
def test_a_sandbox_that_knows_poll_only():
    for one in outcomes(cases(["ppoll", "epoll_pwait"], loader="ringloader", options={})):
        assert one.get("path") == "native", one
