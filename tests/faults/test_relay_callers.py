"""Programs that call the relay of workers on other machines, and say nothing."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path

import pytest

import ringloader._native as _native

pytestmark = pytest.mark.rings_only

MOST_CALLERS = 1024


def seconds_of_the_relay() -> float:
    """Returns the processor time of the relay's thread."""
    for task in Path("/proc/self/task").iterdir():
        # The system keeps 15 characters.
        if (task / "comm").read_text().strip() == "ringloader-relay"[:15]:
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise AssertionError("no relay")


def test_callers_that_say_nothing_take_no_processor_time():
    needed = 2 * MOST_CALLERS + 200
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] < needed:
        pytest.skip(f"{limits[0]} descriptors are too few")
    engine = _native.Engine(1, 8, 64 << 20)
    relay = _native.MainRelay(engine, "127.0.0.1", bytes(32), None)
    callers = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(MOST_CALLERS + 8)]
    try:
        time.sleep(0.3)
        before = seconds_of_the_relay()
        time.sleep(1.0)
        assert seconds_of_the_relay() - before < 0.3
    finally:
        for caller in callers:
            caller.close()
        relay.close()
