"""`Holding`: an epoch ends before its source does only with an error that a caller gets."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from ringloader._dispatch import consumers


class Consumer:
    """A worker that is allowed so many items, has room for so many, and says nothing."""

    has_ended = False
    epoch = 1

    def __init__(self, allowance: int, room: int, is_hungry: bool) -> None:
        self.allowance = allowance
        self.room = room
        self.is_hungry = is_hungry
        self.held: collections.deque[Any] = collections.deque()

    def receive(self, _timeout: float | None) -> bool:
        # A worker whose item the process waits to send takes one.
        self.room += bool(_timeout)
        return False

    def reads_in(self, _epoch: int) -> bool:
        return True

    def send_held(self, _epoch: int) -> None:
        while self.held and self.allowance and self.room:
            self.held.popleft()
            self.allowance -= 1
            self.room -= 1


@pytest.fixture
def resident(monkeypatch):
    found = [0]
    monkeypatch.setattr(consumers, "_private_bytes", lambda: found[0])
    return found


def errors(*consumers: Consumer) -> int:
    return sum(not isinstance(item, int) for one in consumers for item in one.held)


def test_without_a_hungry_worker_nothing_is_given_up(resident):
    hungry, full = Consumer(1000, 1000, True), Consumer(0, 0, False)
    made: Any = consumers.Holding([hungry, full], 1, 100)  # type: ignore[list-item]
    for number in range(200):
        made.wait_for_turn(full)
        assert made.give(full, number)
    # The worker is fed now, but its memory is full.
    hungry.is_hungry, hungry.room = False, 0
    resident[0] = 1000
    for number in range(200):
        assert made.give(hungry, number)
    assert errors(hungry, full) == 0
    hungry.is_hungry = True
    given = [made.give(full, number) for number in range(100)]
    assert False in given
    assert given.index(False) < 70
    assert errors(hungry) == 1


def test_a_few_large_items_are_noticed_at_once(resident):
    hungry, full = Consumer(1000, 1000, True), Consumer(0, 0, False)
    made: Any = consumers.Holding([hungry, full], 1, 100)  # type: ignore[list-item]
    resident[0] = 90
    assert made.give(full, 0)
    resident[0] = 180
    assert not made.give(full, 1)
    assert errors(hungry) == 1
