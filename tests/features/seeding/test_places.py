"""Places that Python counts are those that the native side counts."""

import itertools

import pytest

import ringloader._native as _native
from ringloader import DataLoader
from ringloader._features.seeding import seeding
from systems import parts

pytestmark = pytest.mark.rings_only


class Unsized:
    def __iter__(self):
        return iter([4, 5, 6])


INDICES = [[1, 2], (), [3], range(5), Unsized(), "ab", 7, None]


@pytest.mark.parametrize(("batches", "whole"), [*itertools.product([True, False], repeat=2)])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (3, 4), (2**33 + 1, 2)])
def test_they_are_those_of_the_native_side(batches, whole, first, step):
    native = _native.Places(99, first, step, (), batches, whole)
    ours = seeding.Places(99, first, step, batches, whole)
    for index in INDICES:
        expected, found = native.placed(index), ours.placed(index)
        assert (found.index, found.key, found.first) == (expected.index, expected.key, expected.first)
        assert list(found.places) == list(expected.places)


def test_an_interrupt_is_no_length():
    class Interrupted:
        def __len__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seeding.Places(0, 0, 1, batches=True, whole=False).placed(Interrupted())


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_seeded_as_where_python_counts(workers):
    (batch,) = DataLoader(parts.Drawing(2), batch_size=2, seeding="sample", seed=5, num_workers=workers)
    assert [number.tolist() for number in batch[1:]] == parts.SEEDED
