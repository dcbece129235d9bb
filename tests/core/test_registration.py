"""Memory of slots that a driver has registered: not twice, and for as long as it is there."""

from __future__ import annotations

import collections
import gc
import os
import resource
import textwrap

import pytest

from faults.failing_datasets import Numbers
from faults.proc import mappings
from faults.script import run_script
from parity.harness import taking
from ringloader import DataLoader
from ringloader._features.device import registration
from ringloader._transport import segment_cache

KIBI = 1 << 10
MEBI = 1 << 20
BATCH = 64 * KIBI


@pytest.fixture(autouse=True)
def _path():
    with taking("native"):
        yield


class Driver:
    """Stands for a driver; what one would answer with a fault fails here."""

    def __init__(self):
        self.ranges: dict[int, int] = {}
        self.registered = self.unregistered = self.most = 0
        self.refuses = False

    def register(self, address, nbytes):
        assert nbytes > 0 and address % resource.getpagesize() == 0
        end = address + nbytes
        assert all(end <= start or start + size <= address for start, size in self.ranges.items()), "overlaps"
        if self.refuses:
            raise RuntimeError("out of memory\nstack")
        self.ranges[address] = nbytes
        self.registered += 1
        self.most = max(self.most, self.nbytes)

    def unregister(self, address):
        assert is_mapped(address, self.ranges.pop(address)), "unmapped while it was registered"
        self.unregistered += 1

    @property
    def nbytes(self):
        return sum(self.ranges.values())


def is_mapped(address, nbytes):
    """True if all of a range is the memory of a transport."""
    for line in mappings():
        start, _, end = line.partition(" ")[0].partition("-")
        if int(start, 16) <= address and address + nbytes <= int(end, 16):
            return "memfd:ringloader" in line
    return False


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(registration.registrars, "fake", driver)
    yield driver
    gc.collect()
    assert driver.ranges == {}, "left registered"


def make(batches=24, elements=BATCH // 8, workers=2, max_shared_bytes=24 * MEBI, **options):
    return DataLoader(
        Numbers(batches, elements),
        num_workers=workers,
        batch_size=None,
        max_shared_bytes=max_shared_bytes,
        **options,
    )


def registrations_of(iterator):
    return registration.registrations_of(iterator._transport, "fake")


def register(iterator, batch):
    """Does what is done with a batch that a device copies."""
    found = iterator._transport.engine.slot_memory().window_of(batch.data_ptr())
    if found is None:
        return False
    address, touched = found
    nbytes = batch.data_ptr() - address + batch.nbytes
    assert nbytes <= touched
    return registrations_of(iterator).register(address, nbytes)


def epoch(loader, taken=None):
    """An epoch whose batches are all right. Which of them were registered."""
    iterator = iter(loader)
    registered = []
    for index, batch in enumerate(iterator):
        registered.append(register(iterator, batch))
        assert batch.eq(index).all()
        if index + 1 == taken:
            break
    return registered


def await_steady(loader, driver):
    """Iterates until an epoch registers nothing: on a busy machine one may use a slot for the first time."""
    for _ in range(10):
        count = driver.registered
        if all(epoch(loader)) and driver.registered == count:
            return
    pytest.fail("each epoch registers slots")


def test_a_slot_is_registered_from_its_second_use_on(driver):
    loader = make(40)
    iterator = iter(loader)
    uses = collections.Counter()
    for index, batch in enumerate(iterator):
        assert register(iterator, batch) == (uses[batch.data_ptr()] > 0)
        assert batch.eq(index).all()
        uses[batch.data_ptr()] += 1
    del iterator, batch
    # On a busy machine a slot may be used once only.
    again = sum(number > 1 for number in uses.values())
    assert again > 0, "no slot is used for the second time"
    assert driver.registered == again, "each slot once in vain"
    assert driver.unregistered == 0, "kept for the next epoch"
    # The second epoch may use a slot that the first did not come to.
    assert epoch(loader).count(False) < len(uses), "the next one finds them registered"
    del loader
    assert driver.unregistered == driver.registered


@pytest.mark.slow
def test_a_hundred_epochs(driver, capsys):
    loader = make(12)
    before = segments()
    series = []
    for _ in range(100):
        registered = epoch(loader)
        series.append((driver.registered, driver.nbytes, registered.count(True)))
    with capsys.disabled():
        print("\nregistrations, bytes, batches in registered slots:", *(series[at] for at in (0, 1, 9, -1)))  # noqa: T201
    # On a busy machine a worker gets ahead, and comes to a slot that it had not needed before.
    assert series[-1][0] <= series[9][0] + 2, series
    assert series[-1][2] >= 11
    assert driver.most <= 12 * MEBI, "half of what is shared"
    del loader
    assert segments() <= before


def segments():
    gc.collect()
    return {line.split()[4] for line in mappings() if "memfd:ringloader" in line}


def test_growing_by_little_is_waited_for_and_growing_to_twice_is_not(driver):
    iterator = iter(make(2, workers=1))
    batch = next(iterator)
    memory = iterator._transport.engine.slot_memory()
    (start, touched) = memory.window_of(batch.data_ptr())

    class Memory:
        """One slot, of which the worker touches as much as it is told to."""

        touched = 4096
        registered = 0

        def is_inherited(self):
            return False

        def window_of(self, _address):
            return start, self.touched

        def set_registered(self, _address, nbytes):
            assert nbytes <= self.touched
            self.registered = nbytes
            return True

    assert touched >= BATCH
    memory = Memory()
    registrations = registration.Registrations(memory, "fake", driver)
    sizes = [4096] * 3 + [8192] * 2 + [12288] * 4 + [16384] * 3 + [20480] * 2 + [40960]
    seen = []
    for memory.touched in sizes:
        seen.append(registrations.register(start, memory.touched))
        assert memory.registered == registrations.nbytes == driver.nbytes
    assert (
        seen == [False, True, True, True, True, False, False, True, True] + [False, False, False] + [True] * 3
    )
    registrations.close()
    assert memory.registered == driver.nbytes == 0
    assert not registrations.register(start, 4096)


def test_no_more_than_half_of_the_share(driver):
    """The rest is for batches of other sizes, and for what is leased."""
    loader = make(60, workers=1, max_shared_bytes=16 * BATCH)
    iterator = iter(loader)
    seen = set()
    for _ in range(3):
        held = [next(iterator) for _ in range(6)]
        seen |= {register(iterator, batch) for batch in held}
        del held
    assert seen == {False, True} and driver.most <= 8 * BATCH
    del iterator, loader


def test_a_refusal_is_said_once_and_final(driver, caplog, monkeypatch):
    limits = {resource.RLIMIT_MEMLOCK: (BATCH, BATCH)}
    others = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or others(which))
    loader = make()
    driver.refuses = True
    assert not any(epoch(loader))
    driver.refuses = False
    assert not any(epoch(loader)), "of this memory nothing is registered any more"
    (record,) = caplog.records
    assert "with the driver of fake devices: out of memory, and RLIMIT_MEMLOCK allows" in record.message
    del loader


@pytest.mark.usefixtures("driver")
def test_devices_of_other_types_are_not_registered_for():
    iterator = iter(make(2))
    assert registration.registrations_of(iterator._transport, "xpu") is None
    assert registrations_of(iterator) is registrations_of(iterator)
    del iterator


@pytest.mark.parametrize(
    "end", ["evicted", "switched off", "another plan", "abandoned", "too much", "failed"]
)
def test_nothing_is_left_registered(driver, monkeypatch, end):
    if end == "switched off":
        monkeypatch.setenv(segment_cache.SWITCH, "0")
    if end == "too much":
        monkeypatch.setattr(segment_cache, "MOST_BYTES", BATCH)
    loader, others = make(30), []
    if end == "failed":
        iterator = iter(loader)
        for _ in range(20):
            register(iterator, next(iterator))
        os.kill(iterator._workers[0].pid, 9)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(iterator)
        del iterator
    else:
        assert any(epoch(loader, taken=20 if end == "abandoned" else None))
    if end == "evicted":
        for _ in range(segment_cache.MOST_LOADERS):
            others.append(make(2))
            list(others[-1])
    if end == "another plan":
        loader.prefetch_factor = 5
        list(loader)
    if end == "abandoned":
        assert driver.nbytes, "kept for the next epoch"
        # A slot is registered from its second use on, and on a busy machine one may be new.
        assert epoch(loader)[2:].count(False) <= 2
        del loader
    gc.collect()
    assert driver.nbytes == 0 and driver.registered > 0


def test_batches_outlive_what_was_registered(driver):
    loader = make(30)
    iterator = iter(loader)
    held = []
    for index, batch in enumerate(iterator):
        if register(iterator, batch) and len(held) < 4:
            held.append((index, batch))
    assert len(held) == 4
    del iterator, batch, loader
    gc.collect()
    assert driver.nbytes == 0
    assert all(batch.eq(index).all() for index, batch in held)


def test_an_error_of_the_driver_keeps_the_memory_mapped(driver, caplog, monkeypatch):
    loader = make(30)
    epoch(loader)
    ranges = dict(driver.ranges)
    monkeypatch.setattr(driver, "unregister", refuse)
    del loader
    gc.collect()
    assert "could not be unregistered from the driver of fake devices: no" in caplog.text
    assert all(is_mapped(address, nbytes) for address, nbytes in ranges.items())
    driver.ranges.clear()


def refuse(_address):
    raise RuntimeError("no")


def test_a_forked_child_unregisters_nothing(driver):
    loader = make(30)
    epoch(loader)
    before = dict(driver.ranges)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del loader
            gc.collect()
            status = 0 if driver.ranges == before and not driver.unregistered else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(before.items()) <= set(driver.ranges.items())
    await_steady(loader, driver)
    del loader


def test_persistent_workers_keep_what_is_registered(driver):
    loader = make(30, persistent_workers=True)
    await_steady(loader, driver)
    del loader


@pytest.mark.parametrize("left", ["", "iterator = iter(loader); copy_out(next(iterator))"])
def test_nothing_is_unregistered_while_the_interpreter_goes(left, tmp_path):
    body = """
    from ringloader._features.device import registration

    class Driver:
        def register(self, address, nbytes):
            print("registered")
        def unregister(self, address):
            print("unregistered")

    def copy_out(batch):
        address, touched = iterator._transport.engine.slot_memory().window_of(batch.data_ptr())
        registration.registrations_of(iterator._transport, "fake").register(address, touched)

    registration.registrars["fake"] = Driver()
    loader = DataLoader(Numbers(60, 9000), num_workers=1, batch_size=None)
    iterator = iter(loader)
    for batch in iterator:
        copy_out(batch)
    """
    ended = run_script("ringloader", textwrap.dedent(body) + left, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert "registered" in ended.out and "unregistered" not in ended.out
