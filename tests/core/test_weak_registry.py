"""A registry of objects that compare as they like."""

import gc

from ringloader._common.weak_registry import WeakRegistry


class Alike:
    def __eq__(self, other):
        return True

    def __hash__(self):
        raise AttributeError("no hash yet")


def test_entries_go_by_identity():
    registry, one, two = WeakRegistry(), Alike(), Alike()
    registry.put(one, 1)
    assert (registry.get(one), registry.get(two)) == (1, None)
    registry.put(two, 2)
    registry.put(one, 3)
    assert (registry.get(one), registry.get(two), registry.values()) == (3, 2, [2, 3])
    assert (registry.pop(one), registry.pop(one), registry.values()) == (3, None, [2])


def test_a_value_goes_with_its_object():
    registry, one = WeakRegistry(), Alike()
    registry.put(one, 1)
    registry.put(one, 2)
    one.itself = one
    del one
    gc.collect()
    assert registry.values() == []


def test_one_at_the_same_address_has_no_value():
    registry = WeakRegistry()
    one = Alike()
    registry.put(one, "old")
    # A thread may look between the end of an object and that of its entry.
    registry._entries[id(registry)] = registry._entries.pop(id(one))
    assert registry.get(registry) is None
    registry.put(registry, "new")
    del one
    assert registry.get(registry) == "new"


def test_what_has_no_weak_references_has_no_value():
    registry = WeakRegistry()
    registry.put(7, "seven")
    assert registry.get(7) is None


def test_the_oldest_go():
    registry, all_of_them = WeakRegistry(), [Alike() for _ in range(5)]
    for number, one in enumerate(all_of_them):
        registry.put(one, number)
    registry.put(all_of_them[0], 0)
    registry.keep_newest(3)
    assert registry.values() == [3, 4, 0]
    registry.keep_newest(3)
    assert len(registry.values()) == 3
