"""Programs that call the relay of workers on other machines, and say nothing."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

import ringloader._native as _native

pytestmark = pytest.mark.rings_only

# Many times more than a relay lets in, and few enough for a limit of 1,024 descriptors.
CALLERS = 200


def seconds_of_the_relay() -> float:
    """Returns the processor time of the relay's thread."""
    for task in Path("/proc/self/task").iterdir():
        # The system keeps 15 characters.
        if (task / "comm").read_text().strip() == "ringloader-relay"[:15]:
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise AssertionError("no relay")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_callers_that_say_nothing_take_few_descriptors_and_no_processor_time():
    engine = _native.Engine(1, 8, 64 << 20)
    relay = _native.MainRelay(engine, "127.0.0.1", bytes(32), None)
    relay.expect(engine, 0)
    few = descriptors() + 18
    callers = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(CALLERS)]
    try:
        # The last one is asked who it is, once the ones before were closed.
        assert len(callers[-1].recv(32)) == 32
        assert descriptors() - CALLERS <= few
        before = seconds_of_the_relay()
        time.sleep(1.0)
        assert seconds_of_the_relay() - before < 0.3
    finally:
        for caller in callers:
            caller.close()
        relay.close()
