"""The decision of ``num_workers="auto"``, by simulated rates: no clock, no processes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from ringloader._features.auto.controller import Controller, Decision, Measured

pytestmark = pytest.mark.rings_only

TICK = 0.05


@dataclasses.dataclass
class Load:
    """A loader on a machine, as a rate.

    Attributes:
        cpu: Seconds of a processor that a batch takes.
        wait: Seconds for which a batch waits in the dataset.
        step: Seconds that the caller takes for a batch.
        cores: Processors.
        others: Processors that other programs take.
        quota: Processors that the control group may use.
        serial: Seconds of a batch in which only one worker can be.
        noise: The part by which rates vary.
    """

    cpu: float = 0.0
    wait: float = 0.0
    step: float = 0.0
    cores: float = 2.0
    others: float = 0.0
    quota: float = 1e9
    serial: float = 0.0
    noise: float = 0.0

    def speed(self, workers: int) -> float:
        """Returns the batches per second that workers could make."""
        # Other programs get a processor as often as each worker.
        room = max(self.cores - self.others, self.cores * workers / (workers + self.others), 0.01)
        found = workers / (self.cpu + self.wait)
        if self.cpu:
            found = min(found, min(room, self.quota) / self.cpu)
        return min(found, 1 / self.serial) if self.serial else found

    def look(self, up: int, seconds: float, rng: random.Random) -> tuple[float, Measured]:
        """Returns the batches in some seconds, and what is measured, with ``up`` of the workers started."""
        speed = self.speed(up) * (1 + self.noise * rng.uniform(-1, 1))
        rate = min(speed, 1 / self.step) if self.step else speed
        # The caller waits for what its step leaves.
        waited = max(1 - rate * self.step, 0.0) * seconds if speed <= rate else 0.0
        running = min(rate * self.cpu / up, 1.0)
        wanted = up / (self.cpu + self.wait) * self.cpu / up
        is_short = self.cpu > 0 and rate < up / (self.cpu + self.wait) - 1e-9 and rate == speed
        ready = max(wanted - running, 0.0) if is_short and not self.serial else 0.0
        if is_short and not self.wait and not self.serial:
            ready = 1 - running
        used = rate * self.cpu
        return rate * seconds, Measured(
            seconds=seconds,
            batches=0,
            waited=waited,
            busy=1.0 if rate == speed else 0.0,
            running=running,
            waiting=max(1 - running - ready, 0.0),
            idle_cores=max(self.cores - self.others - used, 0.0),
            throttled=0.5 if is_short and self.quota < self.cores else 0.0,
        )


@dataclasses.dataclass
class Change:
    at: float
    batch: float
    number: int
    waited: float
    is_early: bool


def run(
    load: Load, bound: int = 2, most: int = 8, seconds: float = 60.0, start: float = 0.1, memory: int = 99
) -> tuple[Controller, list[Change], float]:
    """Returns the controller after a simulated time, its changes, and the batches."""
    rng = random.Random(7)
    controller = Controller(bound, most)
    changes: list[Change] = []
    batches = since = counted = caller = 0.0
    begun = now = 0.0
    up_at = [start]
    looks: list[Measured] = []
    while now < seconds:
        now += TICK
        up = max(sum(at <= now for at in up_at[: controller.number]), 0)
        if not up:
            begun = now
            continue
        made, look = load.look(up, TICK, rng)
        batches += made
        since += made
        looks.append(look)
        caller += look.waited
        controller.note(int(batches), now, caller)
        if not controller.is_settled and up == controller.number and now - up_at[-1] > 2 / load.speed(1):
            controller.settle()
            since, begun, looks = 0.0, now, []
            continue
        if not looks or not controller.is_due(int(since), now - begun):
            continue
        whole, is_early = int(since), controller.is_ramping
        sums = {
            name: sum(getattr(one, name) for one in looks) / len(looks)
            for name in ("busy", "running", "waiting", "idle_cores", "throttled")
        }
        waited = sum(one.waited for one in looks)
        measured = Measured(seconds=now - begun, batches=whole, waited=waited, **sums)
        there = controller.number
        found = controller.decide(measured, lambda more, there=there: there + more <= memory)
        counted += whole
        while found.change:
            changes.append(Change(now, counted, controller.number, waited / (now - begun), is_early))
            del up_at[controller.number :]
            if found.change < 0:
                break
            up_at.append(now + start)
            found = controller.decide_more(measured, lambda more, there=there: there + more <= memory)
        since, begun, looks = since - whole, now, []
    return controller, changes, batches


LOADS = {
    "one processor is enough": (Load(cpu=0.04, step=0.05), 1),
    "two processors": (Load(cpu=0.3), 2),
    "two processors, small batches": (Load(cpu=0.0005), 2),
    "samples that sleep": (Load(cpu=0.001, wait=0.32), 8),
    "more processors": (Load(cpu=0.3, cores=8), 7),
    "a step that three workers fill": (Load(cpu=0.001, wait=0.14, step=0.05), 3),
    "one worker holds a lock": (Load(cpu=0.001, wait=0.1, serial=0.095), 1),
    "two of them fit beside a lock": (Load(cpu=0.001, wait=0.1, serial=0.04), 3),
    "other programs on all processors": (Load(cpu=0.02, others=2), 1),
    "a quota of half a processor": (Load(cpu=0.02, quota=0.5), 1),
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("name", LOADS)
def test_it_finds_the_number(name: str, noise: float) -> None:
    load, expected = LOADS[name]
    bound = 7 if load.cores > 2 else 1 if load.quota < 1 else 2
    controller, changes, batches = run(dataclasses.replace(load, noise=noise), bound, 4 * bound)
    # With a lock as the limit, the rate says little about one worker among many.
    over = 3 if load.serial else 1
    assert expected <= controller.number <= expected + over, changes
    most = 4 * bound if load.wait else bound
    best = max(min(load.speed(n), 1 / load.step if load.step else 1e9) for n in range(1, most + 1))
    assert batches >= 0.9 * best * 60 or load.others


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("name", LOADS)
def test_it_does_not_hunt(name: str, noise: float) -> None:
    """Later there is at most one change in 20 batches and in 2 seconds, and none while the caller limits."""
    load, _ = LOADS[name]
    _, changes, _ = run(dataclasses.replace(load, noise=noise), seconds=400.0)
    late = [change for change in changes if not change.is_early]
    for one, another in itertools.pairwise(late):
        assert another.at - one.at >= 2.0 - TICK
        assert another.batch - one.batch >= 20
    assert all(change.waited >= 0.1 for change in changes)
    # Each pause is twice the one before.
    assert len(late) <= 20
    assert len([change for change in late if change.at > 100]) <= 6


def test_memory_for_two_workers_only() -> None:
    controller, changes, _ = run(Load(cpu=0.001, wait=0.3), memory=2)
    assert controller.number == 2
    assert [change.number for change in changes] == [2]


def test_there_are_never_more_than_the_most_and_never_none() -> None:
    rng = random.Random(3)
    controller = Controller(3, 5)
    for _ in range(3000):
        if rng.random() < 0.3:
            controller.settle()
        look = Measured(
            seconds=rng.uniform(0.05, 5),
            batches=rng.randrange(1, 60),
            waited=rng.uniform(0, 5),
            busy=rng.random() + 0.5,
            running=rng.random(),
            waiting=rng.random(),
            idle_cores=rng.uniform(0, 3),
        )
        measure(controller, rng.uniform(1, 100), rng.randrange(6))
        controller.decide(look)
        while controller.decide_more(look).change:
            pass
        assert 1 <= controller.number <= 5


WAITS = Measured(seconds=1.0, batches=10, waited=0.9, waiting=0.95)


def measure(controller: Controller, rate: float, rounds: int = 8, waits: float = 1.0) -> None:
    """Notes some rounds at a rate, in which the caller waits for a part of the time."""
    controller.begin_epoch()
    round_of = controller.number * (1 + int(0.05 * rate / controller.number))
    for batches in range(0, (rounds + 1) * round_of, round_of):
        controller.note(batches, batches / rate, waits * batches / rate)


def made(bound: int = 2, most: int = 8, is_early: bool = True) -> Controller:
    """Returns a controller that knows the rate of one worker: 10 batches per second."""
    controller = Controller(bound, most)
    while not is_early and controller.is_ramping:
        controller.decide(dataclasses.replace(WAITS, waited=0.0))
    measure(controller, 10.0)
    return controller


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"waited": 0.05}, "the caller is the limit"),
        ({"busy": 0.5}, "a worker had nothing to do"),
        ({"throttled": 0.2}, "throttled"),
        ({"waiting": 0.3}, "they run, and no processor is idle"),
    ],
)
def test_no_worker_is_added_where(change: dict[str, float], text: str) -> None:
    assert made().decide(WAITS).change == 1
    assert made().decide(dataclasses.replace(WAITS, **change)) == Decision(0), text


def test_no_worker_is_added_while_the_rate_is_not_known() -> None:
    controller = Controller(2, 8)
    assert controller.decide(WAITS) == Decision(0)
    measure(controller, 10.0)
    assert controller.decide(WAITS).change == 1


def test_idle_processors_are_for_as_many_workers_as_the_bound() -> None:
    runs = dataclasses.replace(WAITS, waiting=0.0, running=1.0, idle_cores=6.0)
    controller = made()
    assert controller.decide(runs).change == 1
    controller.settle()
    # Twice the rate: it stays, and processors that are idle are for others.
    measure(controller, 20.0)
    assert controller.decide(dataclasses.replace(runs, batches=20)).change == 0
    assert controller.number == 2


@pytest.mark.parametrize(("look", "added"), [({}, 3), ({"waiting": 0.0, "idle_cores": 6.0}, 1)])
def test_several_are_added_after_one_look_at_first(look: dict[str, float], added: int) -> None:
    controller, one = made(7, 28), dataclasses.replace(WAITS, **look)
    assert controller.decide(one).change == 1
    while controller.decide_more(one).change:
        pass
    assert controller.number == 1 + added
    late = made(7, 28, is_early=False)
    assert late.decide(one).change == 1
    assert late.decide_more(one) == Decision(0)


def test_workers_of_one_look_share_idle_processors_and_memory() -> None:
    runs = dataclasses.replace(WAITS, waiting=0.0, running=1.0, idle_cores=1.6)
    controller = made(7, 28)
    controller.number = 4
    measure(controller, 40.0)
    assert controller.decide(runs).change == 1
    assert controller.decide_more(runs).change == 1
    assert controller.decide_more(runs).change == 0
    asked = []
    other = made()
    assert other.decide(WAITS, lambda more: not asked.append(more)).change == 1
    assert other.decide_more(WAITS, lambda more: bool(asked.append(more))).change == 0
    assert asked == [1, 2]


def trial(
    rate: float, rounds: int = 8, waits: float = 1.0, is_early: bool = False
) -> tuple[Controller, Decision]:
    """Returns a controller, and its decision about a second worker, with which there is a rate."""
    controller = made(is_early=is_early)
    assert controller.decide(WAITS).change == 1
    controller.settle()
    measure(controller, rate, rounds, waits)
    return controller, controller.decide(dataclasses.replace(WAITS, waiting=0.0))


@pytest.mark.parametrize("is_early", [False, True])
def test_a_third_of_its_share_is_asked_of_a_worker(is_early: bool) -> None:
    assert trial(18.0, is_early=is_early)[1] == Decision(0)
    found = trial(10.5, is_early=is_early)[1]
    assert found.change == -1
    assert "less than a third of its share" in found.why


def test_a_trial_lasts_until_it_is_clear() -> None:
    controller, found = trial(12.5)
    assert found == Decision(0)
    # The difference is small, and gets clear with the samples.
    measure(controller, 12.5, 100)
    assert controller.decide(WAITS).change == -1
    controller, found = trial(10.5, rounds=2)
    assert found == Decision(0)


def test_a_caller_that_no_longer_waits_keeps_the_worker() -> None:
    controller, found = trial(10.5, rounds=50, waits=0.05)
    assert found == Decision(0)
    assert controller.number == 2


def test_a_refusal_is_for_a_time_that_doubles() -> None:
    controller, found = trial(10.5)
    pauses = []
    for _ in range(5):
        assert found.change == -1
        controller.settle()
        measure(controller, 10.0, 50)
        waited = 0
        while not controller.decide(WAITS).change:
            measure(controller, 10.0, 50)
            waited += 1
        pauses.append(waited)
        controller.settle()
        measure(controller, 10.5, 8)
        found = controller.decide(WAITS)
    assert pauses[0] in (9, 10)
    assert all(abs(another - 2 * one) <= 1 for one, another in itertools.pairwise(pauses))


def test_a_trial_whose_workers_were_interrupted_is_over() -> None:
    controller = made()
    assert controller.decide(WAITS).change == 1
    controller.number = 1
    controller.settle()
    measure(controller, 5.0)
    controller.decide(dataclasses.replace(WAITS, busy=0.0))
    assert controller.number == 1


def test_a_start_that_fails_is_the_last() -> None:
    controller = made()
    assert controller.decide(WAITS).change == 1
    controller.undo(for_good=True)
    assert controller.number == 1
    measure(controller, 10.0)
    assert all(controller.decide(WAITS).change == 0 for _ in range(10))
