"""Generated cases as values, and a list of them in which every two values meet.

A list is a function of its seed alone, and a case's name is all that it takes to run it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ringloader._torch import internals

# Every axis and its values. The first is the plain one, which a case's name leaves out.
AXES: Mapping[str, tuple[Any, ...]] = {
    "dataset": (
        "samples",
        "getitems",
        "tensors",
        "subset",
        "list",
        "keyed",
        "trees",
        "raises KeyError",
        "raises several arguments",
        "raises StopIteration",
        "stream",
        "stream, one empty",
        "stream, sized",
        "stream, sized short",
        "stream, raises",
        "datapipe",
        "map datapipe",
    ),
    "order": (
        "sequential",
        "shuffle",
        "replacement",
        "more than there are",
        "subset",
        "weighted",
        "distributed",
        "list",
        "numpy",
        "counted",
        "goes on",
        "fails",
        "lazy",
        "batches",
        "batches of torch",
        "batches, counted",
    ),
    "batch": ("3", "1", "none", "4 dropped", "20"),
    "workers": (2, 1, 3, 0),
    "generator": ("none", "loader", "both"),
    "collate": ("default", "identity", "views", "fails"),
    "init": ("none", "draws", "fails in one"),
    "prefetch": (None, 1, 3),
    "persistent": (False, True),
    "in_order": (True, False),
    "pin": ("no", "yes", "device"),
    "context": ("none", "fork", "object"),
    "timeout": (0, 30),
    "take": (2, None, 0, 1),
    "length": (13, 5, 1, 0),
    "ask_length": (False, True),
}

STREAMS = (
    "stream",
    "stream, one empty",
    "stream, sized",
    "stream, sized short",
    "stream, raises",
    "datapipe",
)
DATAPIPES = ("datapipe", "map datapipe")
BATCH_SAMPLERS = ("batches", "batches of torch", "batches, counted")
# Their samplers count what is asked of them, or their errors tell when.
TOLD_TIMES = ("counted", "goes on", "fails", "lazy", "batches, counted")


@dataclass(frozen=True)
class Generated:
    """One case: a value for each axis."""

    dataset: str = "samples"
    order: str = "sequential"
    batch: str = "3"
    workers: int = 2
    generator: str = "none"
    collate: str = "default"
    init: str = "none"
    prefetch: int | None = None
    persistent: bool = False
    in_order: bool = True
    pin: str = "no"
    context: str = "none"
    timeout: int = 0
    take: int | None = 2
    length: int = 13
    ask_length: bool = False

    def __str__(self) -> str:
        """Returns its name: all that is not plain."""
        parts = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(parts) or "plain"

    @property
    def path(self) -> str:
        """The path that it takes."""
        named = self.pin == "device" and internals.pins_for_named_device()
        return "torch" if self.workers == 0 or named else "native"


def settled(chosen: Mapping[str, Any]) -> Generated:
    """The case nearest to the values: where two cannot stand together, the later one becomes plain.

    What torch refuses is a case too; what would make no difference, or a random one, is none.
    """
    values = dict(chosen)

    def plain(*names: str) -> None:
        values.update({name: AXES[name][0] for name in names})

    if values["workers"] == 0:
        plain("prefetch", "persistent", "context", "timeout")
    if values["dataset"] in STREAMS:
        plain("order", "length")
    if values["dataset"] == "map datapipe" and values["order"] == "distributed":
        plain("order")
    if values["order"] in BATCH_SAMPLERS:
        plain("batch")
    if values["dataset"] == "trees":
        values.update(batch="none", collate="identity")
    if values["dataset"] == "keyed":
        values.update(collate="identity")
    if values["collate"] in ("views", "fails") and (
        values["dataset"] not in ("samples", "getitems") or values["batch"] == "none"
    ):
        plain("collate")
    if values["workers"] > 1 and not values["in_order"]:
        # A batch must not tell which worker made it, nor a sampler when it was asked.
        unordered = values["dataset"] in ("tensors", "list")
        if not unordered or values["init"] == "fails in one" or values["order"] in TOLD_TIMES:
            plain("in_order")
        else:
            values["take"] = None
    return Generated(**values)


def every_pair(seed: int) -> list[Generated]:
    """Cases in which every two values of different axes that can stand together do so at least once."""
    source = random.Random(f"every pair {seed}")
    pairs = [
        {left: one, right: other}
        for left, right in itertools.combinations(AXES, 2)
        for one, other in itertools.product(AXES[left], AXES[right])
    ]
    source.shuffle(pairs)
    seen: set[tuple[tuple[str, Any], ...]] = set()
    cases: dict[Generated, None] = {}
    for pair in pairs:
        if tuple(pair.items()) in seen:
            continue
        # The rest is wild, or, where the two need others that are plain, plain.
        parts = (0.0,) * 9 + (1.0,)
        candidates = [settled(_drawn(source, plain_part=part) | pair) for part in parts]
        candidates = [case for case in candidates if all(getattr(case, k) == v for k, v in pair.items())]
        if candidates:
            best = max(candidates, key=lambda case: len(set(_pairs_of(case)) - seen))
            seen.update(_pairs_of(best))
            cases[best] = None
    return list(cases)


def every_value(seed: int) -> list[Generated]:
    """Few cases, in which every value of every axis occurs among others that are mostly plain."""
    source = random.Random(f"every value {seed}")
    unseen = {(name, value) for name, values in AXES.items() for value in values}
    cases = []
    while unseen:
        name, value = min(unseen, key=repr)
        drawn = (settled(_drawn(source, part) | {name: value}) for part in (0.7,) * 30 + (1.0,))
        # A value can stand among plain ones, so one is left.
        candidates = [case for case in drawn if getattr(case, name) == value]
        best = max(candidates, key=lambda case: len(unseen & dataclasses.asdict(case).items()))
        unseen -= dataclasses.asdict(best).items()
        cases.append(best)
    return cases


def at_random(seed: int, count: int) -> list[Generated]:
    """Cases whose values are drawn, each plain half of the time."""
    source = random.Random(f"at random {seed}")
    cases: dict[Generated, None] = {}
    while len(cases) < count:
        cases[settled(_drawn(source, plain_part=0.5))] = None
    return list(cases)


def _drawn(source: random.Random, plain_part: float) -> dict[str, Any]:
    return {
        name: values[0] if source.random() < plain_part else source.choice(values)
        for name, values in AXES.items()
    }


def _pairs_of(case: Generated) -> Iterator[tuple[tuple[str, Any], ...]]:
    yield from itertools.combinations([(name, getattr(case, name)) for name in AXES], 2)
