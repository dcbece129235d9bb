"""``ringloader.Seeds``: what is equal, what differs, and that the numbers are independent."""

import pickle

import numpy as np
import pytest

from ringloader import Seeds

pytestmark = pytest.mark.rings_only


def test_shared_seeds_are_equal_everywhere():
    everywhere = [Seeds(9, epoch=2, rank=rank).spawn(worker) for rank in range(3) for worker in range(3)]
    drawn = [[seeds.shared() for _ in range(5)] for seeds in everywhere]
    assert all(numbers == drawn[0] for numbers in drawn)
    assert len(set(drawn[0])) == 5


def test_shared_seeds_of_a_worker_go_on_where_its_process_is():
    seeds = Seeds(9)
    first = seeds.shared()
    worker = seeds.spawn(0)
    assert worker.shared() == seeds.shared() != first


def test_unique_seeds_differ_everywhere_and_are_made_again():
    def drawn():
        places = []
        for epoch in range(3):
            for rank in range(3):
                main = Seeds(1, epoch=epoch, rank=rank)
                workers = [main.spawn(worker) for worker in range(3)]
                places += [main, *workers, *(worker.spawn(0) for worker in workers)]
        return [seeds.unique() for seeds in places for _ in range(10)]

    assert drawn() == drawn()
    assert len(set(drawn())) == 3 * 3 * 7 * 10


def test_what_was_drawn_before_does_not_matter():
    seeds = Seeds(4)
    before = seeds.spawn(1)
    for _ in range(3):
        seeds.unique()
    seeds.generator_words(8)
    assert [before.unique() for _ in range(3)] == [one.unique() for one in [seeds.spawn(1)] for _ in range(3)]


def test_a_million_of_them_collide_nowhere():
    """A thousand from each of a thousand places; by chance, two are equal once in 9 million runs."""
    places = [Seeds(3, epoch=epoch, rank=rank).spawn(worker) for epoch, rank, worker in _thousand()]
    drawn = np.array([seeds.unique() for seeds in places for _ in range(1000)], dtype=np.int64)
    assert len(np.unique(drawn)) == 1_000_000
    assert drawn.min() >= 0


def _thousand():
    return [(number // 100, number // 10 % 10, number % 10) for number in range(1000)]


def test_streams_are_independent():
    """Of neighbours: words, their lowest bits, and a place's number against what it draws."""
    places = [Seeds(seed).spawn(worker) for seed in (0, 1) for worker in range(4)]
    drawn = np.array([[seeds.unique() for _ in range(20_000)] for seeds in places], dtype=np.int64)
    for bits in (drawn.astype(float), (drawn & 1).astype(float)):
        correlated = np.corrcoef(bits) - np.eye(len(places))
        # 28 pairs, each normal with a deviation of 0.007.
        assert abs(correlated).max() < 0.035
        lagged = [np.corrcoef(one[:-1], one[1:])[0, 1] for one in bits]
        assert max(map(abs, lagged)) < 0.035
    # Each bit is as often 1 as 0, over all places.
    ones = [((drawn >> bit) & 1).mean() for bit in range(63)]
    assert max(abs(share - 0.5) for share in ones) < 0.0075


def test_first_seeds_of_many_places_are_uniform():
    first = np.array(
        [Seeds(7, rank=rank).spawn(worker).unique() for rank in range(50) for worker in range(40)]
    )
    counts, _ = np.histogram(first.astype(float), bins=20, range=(0, 2.0**63))
    # 100 are expected in each, with a deviation of 10.
    assert (abs(counts - 100) < 50).all()


def test_copies_go_on_alike():
    seeds = Seeds(2**64 - 1, epoch=2**32 - 1).spawn(3)
    seeds.unique()
    copied = pickle.loads(pickle.dumps(seeds))
    assert (copied.unique(), copied.shared()) == (seeds.unique(), seeds.shared())
    assert seeds.epoch == 2**32 - 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seed": 1.0}, TypeError, "seed must be an int, not 1.0"),
        ({"seed": 2**64}, ValueError, f"seed must be from 0 up to and without {2**64}, not {2**64}"),
        ({"seed": 1, "epoch": -1}, ValueError, "epoch must be from 0"),
        ({"seed": 1, "rank": True}, TypeError, "rank must be an int, not True"),
    ],
)
def test_what_is_wrong_is_said_at_once(options, error, text):
    with pytest.raises(error, match=text):
        Seeds(**options)
    with pytest.raises(ValueError, match=r"worker_id must be from 0 .* not -1"):
        Seeds(1).spawn(-1)


def test_without_agreement_nothing_is_shared():
    seeds = Seeds(1, shared_by_all=False)
    seeds.unique()
    for one in (seeds, seeds.spawn(0)):
        with pytest.raises(RuntimeError, match="must be equal on all ranks"):
            one.shared()
