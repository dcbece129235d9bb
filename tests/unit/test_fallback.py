"""Objects that the ordinary pickle cannot send: cloudpickle is asked then, and an error names the object."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import logging
import pickle
import sys
import threading
import types
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringloader._start import definitions, fallback


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
    return pickle.loads(fallback.attempt(thing, functools.partial(dumps, thing=thing), ways))


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

    assert pickle.loads(fallback.attempt(None, dump))[0] == "changed"


NOT_CLOUDPICKLES = {
    "an open file": lambda: Path(__file__).open(encoding="utf-8"),  # noqa: SIM115
    "a logger that nobody finds": lambda: logging.Logger("alone"),
    "a root logger": lambda: logging.RootLogger(logging.INFO),
    "a view of memory": lambda: memoryview(b"12"),
    "keys": lambda: {}.keys(),
    "values": lambda: {}.values(),
    "items": lambda: {}.items(),
    "ordered keys": lambda: collections.OrderedDict().keys(),
    "ordered values": lambda: collections.OrderedDict().values(),
    "ordered items": lambda: collections.OrderedDict().items(),
    "weak references": lambda: weakref.WeakSet([Holder]),
    "a module that nobody finds": lambda: types.ModuleType("alone"),
}


def answer(sent: Any, thing: Any) -> Any:
    try:
        return type(sent(thing))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("case", NOT_CLOUDPICKLES)
def test_the_ordinary_pickle_answers_for_all_but_functions_and_classes(case):
    thing = NOT_CLOUDPICKLES[case]()
    expected = answer(lambda thing: pickle.loads(pickle.dumps(thing)), thing)
    # The function makes cloudpickle do it.
    assert answer(lambda thing: send([thing, lambda: 0])[0], thing) == expected
    assert answer(send, thing) == expected


def test_each_reducer_of_cloudpickle_is_known():
    """A new one is for a part of functions and classes, or makes a copy of another kind."""
    cloudpickle = pytest.importorskip("cloudpickle")
    known = {type(make()) for make in NOT_CLOUDPICKLES.values()}
    assert set(cloudpickle.Pickler._dispatch_table) <= known | set(fallback._PARTS) | {types.MappingProxyType}


def test_parts_of_functions_and_classes_go_with_them():
    held = {"a": 1}
    shown = types.MappingProxyType(held)

    @dataclasses.dataclass
    class Local:
        size: int = dataclasses.field(default=1, metadata={"help": "pixels"})

        @property
        def double(self) -> int:
            return 2 * self.size

        @classmethod
        def made(cls) -> Any:
            return cls(dataclasses.asdict(cls())["size"] + 1)

    sent, view, its = send([lambda: (Local, threading), shown, held])
    kind, module = sent()
    assert (kind.made().double, dataclasses.fields(kind)[0].metadata["help"]) == (4, "pixels")
    assert module is threading
    its["b"] = 2
    assert view["b"] == 2, "the view of the same dict"


ARGUMENTS = fallback.Arguments


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda bad: ARGUMENTS(dataset=Holder(transform=Holder(fn=bad))), "dataset.transform.fn"),
        (lambda bad: ARGUMENTS(dataset=[1], collate_fn=bad), "collate_fn"),
        (lambda bad: Pair(1, [Holder(), {"a": (bad,)}]), "second[1]['a'][0]"),
        (lambda bad: Pair(functools.partial(print, 1, file=bad), 1), "first.keywords['file']"),
        (lambda bad: Pair(functools.partial(print, bad), 1), "first.args[0]"),
        (lambda bad: Holder(collate=Holder(lock=bad).method), "collate.__self__.lock"),
        (lambda bad: Pair(1, lambda: bad), "second.bad"),
    ],
)
def test_the_place(make, place):
    with pytest.raises(Exception, match="pickle") as caught:
        send(make(number for number in ()), "something else")
    note = our_note(caught.value)
    assert note.startswith(f"{place}: <generator object ")
    assert "nor by cloudpickle (cannot pickle 'generator' object): let each worker" in note
    assert note.endswith(", or pass something else")


def our_note(error):
    """Returns our note. Python 3.14 says in notes of its own what it was serializing."""
    (ours,) = [note for note in error.__notes__ if not note.startswith("when serializing")]
    return ours


def test_the_place_of_a_class(monkeypatch):
    class Local:
        pass

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        send(ARGUMENTS(dataset=[Local()]))
    note = our_note(caught.value)
    assert note.startswith("dataset[0]: <class '")
    assert note.endswith("or install cloudpickle (pip install ringloader[cloudpickle])")


class Hides:
    """Its state refers to what no attribute does."""

    def __init__(self) -> None:
        self.itself = self

    def __getstate__(self) -> Any:
        return {"lock": threading.Lock()}


def test_no_place_is_found():
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as caught:
        send(Hides())
    assert our_note(caught.value).startswith("<unlocked _thread.lock object")


class Raises:
    def __getstate__(self) -> Any:
        raise ValueError("mine")


def test_other_errors_are_the_objects_own():
    with pytest.raises(ValueError, match="mine") as caught:
        send(Raises())
    assert not hasattr(caught.value, "__notes__")


def test_definitions_are_compared_by_identity(monkeypatch):
    main = sys.modules["__main__"]

    def define(name: str) -> Any:
        made = type(name, (), {"__module__": "__main__"})
        monkeypatch.setattr(main, name, made, raising=False)
        return made

    define("One")
    of_process = definitions.of_now()
    other = define("Other")
    for thing, is_in in ((main.One, True), (other, False), (Holder, True), ([other], True)):
        found: dict[str, Any] = {}
        assert definitions.recorder(found)(thing) is NotImplemented
        assert definitions.are_in(found, of_process) is is_in
    found = {}
    definitions.recorder(found)(main.One)
    cached = functools.cache(main.One)
    monkeypatch.setattr(main, "One", cached)
    assert not definitions.are_in(found, definitions.of_now())
    definitions.recorder(found)(cached)
    assert definitions.are_in(found, definitions.of_now())
    define("One")
    assert not definitions.are_in(found, definitions.of_now())
    assert not definitions.are_in(found, {}), "also where the class has gone"
