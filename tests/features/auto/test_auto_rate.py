"""The rate of ``num_workers="auto"``, and its error."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from ringloader._features.auto.measuring import Rate, error

pytestmark = pytest.mark.rings_only


def noted(times: list[float], workers: int = 1, waits: float = 1.0) -> Rate:
    """Returns a rate of rounds that take these times."""
    found, now = Rate(workers, 0.1), 0.0
    for at, time in enumerate([0.0, *times]):
        now += time
        found.note(at * workers, now, waits * now)
    return found


def test_a_burst_is_a_round() -> None:
    """Batches of four workers come together: each look counts, but only whole rounds are samples."""
    found, now = Rate(4, 0.1), 0.0
    found.note(0, now, now)
    for at in range(1, 41):
        if at % 4 == 1:
            now += 0.2
        found.note(at, now, now)
    assert found.samples == 10
    assert found.value == pytest.approx(20)
    assert found.deviations == pytest.approx(0, abs=1e-9)


def test_looks_that_meet_no_round_make_longer_samples() -> None:
    found = Rate(6, 0.1)
    found.note(0, 0.0, 0.0)
    for at in range(1, 200, 6):
        found.note(at, at / 20, at / 20)
    # The first ends after four rounds, and then looks meet rounds.
    assert found.samples == 1 + (199 - 25) // 6
    assert found.value == pytest.approx(20)


def test_short_rounds_make_a_longer_sample() -> None:
    found = noted([0.01] * 100)
    assert 15 <= found.samples <= 20
    assert found.value == pytest.approx(100)


def test_samples_in_which_the_caller_hardly_waits_do_not_count() -> None:
    found = noted([0.1] * 10, waits=0.05)
    assert found.samples == 0
    assert found.waited == pytest.approx(0.05 * found.seconds)


def test_a_caller_that_does_something_else_is_left_out() -> None:
    found = noted([0.1] * 10)
    found.note(11, 1.0 + 1.5, 1.0 + 0.3)
    assert found.samples == 10
    assert found.value == pytest.approx(10)
    found.note(12, 2.6, 1.4)
    assert found.samples == 11


def test_what_the_caller_does_most_of_the_time_counts() -> None:
    """A burst at the beginning makes all that follows look slow."""
    found = noted([0.06])
    for at in range(2, 40):
        found.note(at, at / 2, at / 4)
    assert found.samples >= 20
    assert found.value == pytest.approx(2, rel=0.1)


def test_totals_begin_anew_with_an_epoch() -> None:
    found = noted([0.1] * 3)
    found.begin_epoch()
    found.note(0, 9.0, 0.0)
    found.note(1, 9.1, 0.1)
    assert found.samples == 4
    assert found.value == pytest.approx(10)


@pytest.mark.parametrize("deviation", [0.1, 0.3, 0.8])
def test_the_error_is_that_of_many_measurements(deviation: float) -> None:
    rng = random.Random(1)
    sigma = math.sqrt(math.log(1 + deviation**2))
    many = [noted([0.06 + rng.lognormvariate(0, sigma) for _ in range(60)]) for _ in range(300)]
    spread = statistics.stdev(math.log(one.value) for one in many)
    errors = [error(one) for one in many]
    assert statistics.mean(errors) == pytest.approx(spread, rel=0.35)
    pairs = [error(one, another) for one, another in itertools.pairwise(many)]
    assert statistics.mean(pairs) == pytest.approx(math.sqrt(2) * statistics.mean(errors), rel=0.1)


def test_few_samples_are_not_known() -> None:
    assert not noted([0.1] * 7).is_known
    assert noted([0.1] * 8).is_known
    assert noted([0.1] * 2, workers=4).is_known
    assert error(noted([0.1])) == pytest.approx(0.3)
