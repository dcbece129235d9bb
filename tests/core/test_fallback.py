"""Objects that the ordinary pickle cannot send: cloudpickle is asked then, and an error names the object."""

from __future__ import annotations

import dataclasses
import functools
import io
import multiprocessing
import pickle
import sys
import threading
import types
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringloader._start import fallback


class Holder:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def method(self) -> None:
        pass


class Pair(NamedTuple):
    first: Any
    second: Any


def dumps(new_pickler: Any, thing: Any) -> bytes:
    file = io.BytesIO()
    new_pickler(file).dump(thing)
    return file.getvalue()


def send(thing: Any, ways: str = "") -> Any:
    return pickle.loads(fallback.attempt(functools.partial(dumps, thing=thing), ways))


def test_cloudpickle_is_not_imported_for_what_pickle_sends(monkeypatch):
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    assert send([1, Pair(1, 2)]) == [1, Pair(1, 2)]
    assert "cloudpickle" not in sys.modules
    assert send(lambda: 5)() == 5
    assert "cloudpickle" in sys.modules


def test_an_object_stays_one_object():
    held = Holder()
    sent = send({"one": Holder(of=held, function=lambda: held), "other": held})
    assert sent["one"].of is sent["other"] is sent["one"].function()


def test_reductions_for_other_processes_come_first(monkeypatch):
    reductions = reduction.ForkingPickler._extra_reducers
    for kind in (Holder, property):
        monkeypatch.setitem(reductions, kind, lambda thing: (str, (f"a {type(thing).__name__}",)))
    assert send([Holder(), property(), lambda: 0])[:2] == ["a Holder", "a property"]

    def dump(new_pickler):
        file = io.BytesIO()
        pickler = new_pickler(file)
        pickler.dispatch_table = {**pickler.dispatch_table, Holder: lambda _: (str, ("changed",))}
        pickler.dump([Holder(), lambda: 0])
        return file.getvalue()

    assert pickle.loads(fallback.attempt(dump))[0] == "changed"


COPIED = {
    "an open file": lambda: Path(__file__).open(encoding="utf-8"),  # noqa: SIM115
    "a view of memory": lambda: memoryview(b"12"),
}


def answer(sent: Any, thing: Any) -> Any:
    try:
        return type(sent(thing))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("case", COPIED)
def test_the_ordinary_pickle_answers_for_what_cloudpickle_would_copy(case):
    thing = COPIED[case]()
    expected = answer(lambda thing: pickle.loads(pickle.dumps(thing)), thing)
    # The function makes cloudpickle do it.
    assert answer(lambda thing: send([thing, lambda: 0])[0], thing) == expected
    assert answer(send, thing) == expected


def test_parts_of_functions_and_classes_go_with_them():
    shown = types.MappingProxyType({"a": 1})

    @dataclasses.dataclass
    class Local:
        size: int = dataclasses.field(default=1, metadata={"help": "pixels"})

        @property
        def double(self) -> int:
            return 2 * self.size

        @classmethod
        def made(cls) -> Any:
            return cls(dataclasses.asdict(cls())["size"] + 1)

    sent, view = send([lambda: (Local, threading), shown])
    kind, module = sent()
    assert (kind.made().double, dataclasses.fields(kind)[0].metadata["help"]) == (4, "pixels")
    assert module is threading
    assert view == {"a": 1}


def test_a_note_names_the_type():
    with pytest.raises(TypeError, match="cannot pickle 'generator' object") as caught:
        send(Holder(transform=Holder(fn=(number for number in ()))), "something else")
    assert our_note(caught.value) == (
        "<class 'generator'> cannot be pickled for worker processes, nor by cloudpickle (cannot pickle "
        "'generator' object): let each worker make its own, at the first use, or pass something else"
    )


def our_note(error):
    """Returns our note. Python 3.14 says in notes of its own what it was serializing."""
    (ours,) = [note for note in error.__notes__ if not note.startswith("when serializing")]
    return ours


def test_a_note_of_a_lock_of_another_start_method():
    lock = multiprocessing.get_context("fork").Lock()
    with pytest.raises(RuntimeError) as caught:
        send([lock])
    assert "make it with multiprocessing.get_context('spawn')" in our_note(caught.value)


def test_without_cloudpickle_the_note_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        send([lambda: 0])
    assert "install cloudpickle (pip install cloudpickle)" in our_note(caught.value)


class Raises:
    def __getstate__(self) -> Any:
        raise ValueError("mine")


def test_other_errors_are_the_objects_own():
    with pytest.raises(ValueError, match="mine") as caught:
        send(Raises())
    assert not hasattr(caught.value, "__notes__")
