"""Notes about objects that compare as they like."""

import gc

from ringloader._common.weak_registry import Notes


class Alike:
    def __eq__(self, other):
        return True

    def __hash__(self):
        raise AttributeError("no hash yet")


def test_notes_go_by_identity():
    notes, one, two = Notes(), Alike(), Alike()
    notes.put(one, 1)
    assert (notes.get(one), notes.get(two)) == (1, None)
    notes.put(two, 2)
    notes.put(one, 3)
    assert (notes.get(one), notes.get(two), notes.all()) == (3, 2, [2, 3])
    assert (notes.pop(one), notes.pop(one), notes.all()) == (3, None, [2])


def test_a_note_goes_with_its_object():
    notes, one = Notes(), Alike()
    notes.put(one, 1)
    notes.put(one, 2)
    one.itself = one
    del one
    gc.collect()
    assert notes.all() == []


def test_one_at_the_same_address_has_no_note():
    notes = Notes()
    one = Alike()
    notes.put(one, "old")
    # As for a thread that looks between the end of an object and that of its note.
    notes._notes[id(notes)] = notes._notes.pop(id(one))
    assert notes.get(notes) is None
    notes.put(notes, "new")
    del one
    assert notes.get(notes) == "new"


def test_what_has_no_weak_references_has_no_note():
    notes = Notes()
    notes.put(7, "seven")
    assert notes.get(7) is None


def test_the_oldest_go():
    notes, all_of_them = Notes(), [Alike() for _ in range(5)]
    for number, one in enumerate(all_of_them):
        notes.put(one, number)
    notes.put(all_of_them[0], 0)
    notes.keep_newest(3)
    assert notes.all() == [3, 4, 0]
    notes.keep_newest(3)
    assert len(notes.all()) == 3
