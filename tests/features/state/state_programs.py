"""Random programs that stop an epoch and go on, compared with the same epoch as a whole.

A number makes a program: ``made(5)``. ``failure_of`` runs it. ``excluded`` lists what is not promised.
``python tests/features/state/state_programs.py 0 1000`` runs programs by their numbers and shrinks those that
fail.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import json
import logging
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import ringloader

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from features.state import state_program_parts as parts

# Moments of the state. Those of the second group are in the midst of a call of `next`.
BETWEEN = ["before", "between", "end", "bad"]
AMID = ["timer", "thread", "inside"]
SIZES = [1, 2, 3, 4, 7]


@dataclasses.dataclass(frozen=True)
class Leg:
    """One loader of a program: how it is made, and when its state is taken."""

    workers: int = 0
    is_thread: bool = False
    persistent: bool = False
    size: int = 4
    every: int = 1
    # How it is made of the loader before: "fresh", "same", "copy", "pickle", "fork".
    how: str = "fresh"
    when: str = "between"
    # Batches before the state, and after that the number of the read, or the delay.
    batches: int = 1
    tick: int = 0
    # Batches that are taken after the state.
    more: int = 0
    passing: str = "none"
    sets_epoch: bool = True


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: legs that stop, and a last one that reads the rest and two more epochs."""

    number: int = 0
    dataset: str = "map"
    length: int = 23
    order: str = "none"
    around: str = ""
    index: str = "int"
    drop_last: bool = False
    rolls: bool = False
    bad: tuple[int, ...] = ()
    in_order: bool = True
    seeding: str = "torch"
    seed: int | None = None
    reseeds: bool = False
    resets: bool = False
    prefetches: bool = False
    sets_epoch: bool = False
    epoch: int = 0
    legs: tuple[Leg, ...] = (Leg(), Leg())

    @property
    def is_stream(self) -> bool:
        return self.dataset in parts.STREAMS

    @property
    def draws_from_program(self) -> bool:
        """True if the order comes from the program's generator, or its generator gives the base seed."""
        return self.order in ("shuffle", "shuffle, default", "random", "replacement", "subset", "weighted")


def excluded(program: Program) -> str | None:
    """Returns why a program is outside of what is promised, or None."""
    legs = program.legs
    first = legs[0]
    for rule, reason in (
        (
            any(leg.workers != first.workers for leg in legs)
            and (program.is_stream or program.dataset == "counting map"),
            "a dataset that is read in other parts, or has the state of each worker: ValueError",
        ),
        (
            any(leg.is_thread and leg.workers > 1 for leg in legs)
            and program.dataset in ("counting map", "stateful", "sticky"),
            "threads that share a dataset with a state: RuntimeError",
        ),
        (
            program.rolls and program.index not in ("int", "numpy", "tensor"),
            "a remainder of indices that are no ints: RuntimeError",
        ),
        (
            (program.rolls or program.is_stream or "batches" in program.around)
            and any(leg.size != first.size for leg in legs),
            "another remainder, or a batch sampler of one's own: ValueError; a stream is not regrouped",
        ),
        (
            program.dataset == "stateful" and any(leg.how == "same" and leg.batches == 0 for leg in legs),
            "a state without the dataset's, of a loader whose dataset has moved on: it stays where it is",
        ),
        (
            program.prefetches and program.dataset != "map",
            "prefetch_epochs and an iterable dataset, or a dataset with a state: ValueError",
        ),
        (
            program.prefetches and program.resets and any(leg.is_thread for leg in legs),
            "threads share the dataset, and the function of the next epoch writes to it in this one",
        ),
        (
            (
                program.around == "own batches, state"
                and program.order
                in (
                    "seeded",
                    "own state",
                    "counts at end",
                    "counts at beginning",
                    "shuffle",
                    "random",
                    "replacement",
                    "subset",
                    "weighted",
                )
            )
            or (program.around == "own batches, state" and "generator" in program.order),
            "a batch sampler whose state lacks what it reads from",
        ),
        (
            program.around != ""
            and program.order
            in (
                "own state",
                "own cursor",
                "shuffle",
                "random",
                "shuffle, default",
                "replacement",
                "subset",
                "weighted",
            ),
            "a sampler whose draws or state the one around it hides: it is read from its beginning",
        ),
        (
            program.index == "tensor" and any(leg.how == "fork" for leg in legs),
            "the thread that hands out the memory of tensors is not there in a forked child, as with torch",
        ),
        (program.order == "random, both" and program.around != "", "two generators inside"),
        (
            program.bad and (program.is_stream or program.index == "none"),
            "a generator ends with its first error, as in Python; without indices all samples are bad",
        ),
        (
            program.order == "shuffle, default" and any(leg.how == "pickle" for leg in legs),
            "the program's generator, pickled, is another one",
        ),
    ):
        if rule:
            return reason
    return None


def made(number: int) -> Program:
    """Returns the program of a number."""
    rng = random.Random(number)
    while True:
        program = _made(rng, number)
        if excluded(program) is None:
            return program


def _made(rng: random.Random, number: int) -> Program:
    def chance(share: float) -> bool:
        return rng.random() < share

    dataset = rng.choice(["map"] * 6 + ["counting map"] * 2 + list(parts.STREAMS))
    is_stream = dataset in parts.STREAMS
    order = "none" if is_stream else rng.choice(parts.ORDERS)
    around = "" if is_stream or chance(0.55) else rng.choice(parts.AROUND[1:])
    has_index = order in parts.OWN or around not in ("", "batches", "two batches")
    index = rng.choice(list(parts.INDICES)) if has_index and chance(0.5) else "int"
    workers = rng.choice([0, 0, 0, 1, 2, 3])
    is_thread = workers > 0 and chance(0.3)
    persistent = workers > 0 and chance(0.4)
    size = rng.choice(SIZES)
    rolls = not is_stream and not around.startswith(("own", "batches", "two batches")) and chance(0.15)
    seeding = rng.choice(["torch", "torch", "sample", "batch"])
    reseeds = seeding == "torch" and chance(0.2)
    legs = []
    for at in range(rng.choice([2, 2, 2, 3])):
        if at:
            if not is_stream and dataset == "map" and chance(0.6):
                workers = rng.choice([1, 2, 3]) if persistent else rng.choice([0, 0, 1, 2, 3])
                is_thread = workers > 0 and chance(0.3)
            if not (rolls or is_stream) and chance(0.3):
                size = rng.choice(SIZES)
        how = "fresh" if at == 0 else rng.choice(["fresh"] * 4 + ["same"] * 2 + ["copy", "pickle", "fork"])
        when = rng.choice(BETWEEN + AMID * 2 if workers == 0 else BETWEEN * 2 + AMID)
        legs.append(
            Leg(
                workers, is_thread, persistent, size, rng.choice([1, 1, 2, 3]), how, when,
                rng.choice([0, 1, 1, 2, 3, 5]), int(rng.random() ** 2 * 400), rng.choice([0, 0, 1, 2]),
                rng.choice(["none", "json", "pickle", "torch"]), chance(0.5),
            )
        )  # fmt: skip
    # A loader that goes on is as it was made.
    for at in range(1, len(legs)):
        if legs[at].how in ("same",):
            before = legs[at - 1]
            kept = {name: getattr(before, name) for name in ("workers", "is_thread", "size", "every")}
            legs[at] = dataclasses.replace(legs[at], **kept)
        elif legs[at].how == "fork" and at < len(legs) - 1:
            legs[at] = dataclasses.replace(legs[at], how="fresh")
    is_map = not is_stream
    return Program(
        number, dataset, rng.choice([12, 23]), order, around, index,
        chance(0.2) and not rolls and not is_stream, rolls,
        tuple(rng.sample(range(12), rng.choice([1, 2, 3]))) if chance(0.15) and is_map else (),
        not chance(0.2), seeding, rng.choice([None, 7]), reseeds, chance(0.3),
        persistent and chance(0.4), chance(0.6), rng.choice([0, 0, 1, 2]), tuple(legs),
    )  # fmt: skip


def build(program: Program, leg: Leg) -> Any:
    draws = program.seeding != "torch" and not any(leg.is_thread for leg in program.legs)
    data = parts.DATASETS[program.dataset](program.length, draws, program.bad)
    if program.is_stream:
        given: dict[str, Any] = {"batch_size": leg.size}
    else:
        given = parts.ordered(
            program.order, program.around, program.index, data, program.length, leg.size, program.drop_last
        )
    if program.rolls:
        given.pop("drop_last", None)
        given["last_batch"] = "rollover"
    if program.bad:
        given["on_error"] = "skip"
    if program.resets:
        given["worker_reset_fn"] = parts.reset
    if leg.workers:
        given |= {"num_workers": leg.workers, "persistent_workers": leg.persistent}
        given["worker_method"] = "thread" if leg.is_thread else "multiprocessing"
        given["prefetch_epochs"] = program.prefetches
    has_seed = program.resets or program.reseeds or program.seeding != "torch"
    return ringloader.StatefulDataLoader(
        data, collate_fn=list, in_order=program.in_order,
        seeding="epoch" if program.reseeds else program.seeding,
        seed=program.seed if has_seed else None,
        snapshot_every_n_steps=leg.every, **given,
    )  # fmt: skip


@dataclasses.dataclass
class Stop:
    """A state, and what `next` had returned: ``low`` to ``high`` of the leg's batches."""

    state: Any
    rng: Any
    low: int
    high: int


@contextlib.contextmanager
def hooked(call: Callable[[], None]) -> Iterator[None]:
    parts.Hook.pid, parts.Hook.call = os.getpid(), call
    try:
        yield
    finally:
        parts.Hook.call = None


def stopped(loader: Any, leg: Leg, seen: list[Any]) -> Stop:
    """Reads some batches into ``seen``, and takes the state at the leg's moment."""
    found: list[Stop] = []

    def take() -> None:
        if not found:
            low = len(seen)
            state = loader.state_dict()
            found.append(Stop(state, torch.get_rng_state(), low, len(seen)))

    if leg.when == "before":
        take()
        return found[0]
    iterator = iter(loader)
    if leg.when == "end":
        seen += iterator
        take()
    elif leg.when in ("between", "bad"):
        with contextlib.suppress(ValueError) if leg.when == "bad" else contextlib.nullcontext():
            for _ in range(leg.batches if leg.when == "between" else 100):
                try:
                    seen.append(next(iterator))
                except StopIteration:
                    break
        take()
    elif leg.when == "inside":
        reads = [leg.tick % 20]

        def read() -> None:
            reads[0] -= 1
            if reads[0] == -1:
                take()

        with hooked(read):
            for batch in iterator:
                seen.append(batch)
                if found:
                    break
        take()
    else:
        _beside(iterator, leg, seen, take)
        take()
    # What comes after the state is of no interest to it.
    with contextlib.suppress(ValueError):
        for _ in range(leg.more):
            next(iterator, None)
    return found[0]


def _beside(iterator: Any, leg: Leg, seen: list[Any], take: Callable[[], None]) -> None:
    delay = leg.tick * 2e-5
    main = threading.get_ident()
    done = threading.Event()
    if leg.when == "timer":
        signal.signal(signal.SIGUSR1, lambda *_: take())

    def beside() -> None:
        time.sleep(delay)
        if leg.when == "timer":
            signal.pthread_kill(main, signal.SIGUSR1)
        else:
            take()
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()
    for batch in iterator:
        seen.append(batch)
        if done.is_set():
            break
    thread.join()
    if leg.when == "timer":
        time.sleep(0)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def passed_on(state: Any, passing: str) -> Any:
    if passing == "json":
        return json.loads(json.dumps(state))
    if passing == "pickle":
        return pickle.loads(pickle.dumps(state))
    if passing == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    return state


def begin_program() -> None:
    torch.manual_seed(11)
    random.seed(12)


def whole(program: Program) -> list[tuple[list[Any], Any]]:
    """Returns the batches and the fingerprint of each epoch of a run that is never stopped."""
    begin_program()
    sizes = {leg.size for leg in program.legs}
    if len(sizes) > 1:
        program = dataclasses.replace(program, drop_last=False)
    loader = build(program, program.legs[0])
    found = []
    for epoch in range(program.epoch + 3):
        if program.sets_epoch:
            loader.set_epoch(epoch)
        found.append((list(loader), loader.fingerprint()))
    return found


def flat(batches: list[Any]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


class WrongError(AssertionError):
    """A promise that a program has found broken."""


def run(program: Program) -> None:
    """Runs a program.

    Raises:
        WrongError: If what came is not what a run that was never stopped has.
    """
    expected = whole(program)
    begin_program()
    loader: Any = build(program, program.legs[0])
    for epoch in range(program.epoch):
        if program.sets_epoch:
            loader.set_epoch(epoch)
        collections.deque(loader, maxlen=0)
    if program.sets_epoch:
        loader.set_epoch(program.epoch)
    # What `next` had returned when the state was taken: of several possibilities, one.
    candidates: list[list[Any]] = [[]]
    alive: list[Any] = []
    stop: Stop | None = None
    at_beginning = program.epoch > 0
    whens = []
    for leg in program.legs[:-1]:
        if stop is not None:
            loader = resumed(program, leg, loader, stop, False)
        seen: list[Any] = []
        number = flat(expected[program.epoch][0])
        keeps = leg.workers > 0 and not leg.is_thread and any(one.how == "same" for one in program.legs)
        if leg.when == "bad" and number and not (program.is_stream or program.bad or keeps):
            loader.dataset.broken = number[leg.tick % len(number)][0]
        stop = stopped(loader, leg, seen)
        loader.dataset.broken = None
        whens.append(leg.when)
        alive.append(loader)
        candidates = [
            [*before, *seen[:many]] for before in candidates for many in range(stop.low, stop.high + 1)
        ]
        if stop.state.get("_iterator_finished") and any(candidates):
            at_beginning = False
            break
    assert stop is not None
    last = program.legs[-1]
    is_over = bool(stop.state["_iterator_finished"]) and (not at_beginning or any(candidates))
    if program.seeding and last.how == "fork":
        rest, later = _in_child(lambda: the_rest(program, last, loader, stop, is_over))
    else:
        rest, later = the_rest(program, last, loader, stop, is_over)
    judge(program, expected, candidates, rest, later, whens)


def resumed(program: Program, leg: Leg, before: Any, stop: Stop, is_over: bool) -> Any:
    """Returns a loader that has loaded the state."""
    loader = before if leg.how == "same" else build(program, leg)
    state = passed_on(stop.state, leg.passing)
    kept = copy.deepcopy(state)
    if leg.how != "same":
        torch.manual_seed(99)
    if program.sets_epoch and leg.sets_epoch:
        loader.set_epoch(program.epoch)
    loader.load_state_dict(state)
    if program.sets_epoch and state["_iterator_finished"]:
        # The state is that of the epoch before, and the program has to say which one begins.
        loader.set_epoch(program.epoch + is_over)
    if leg.how == "copy":
        loader = copy.copy(loader)
    elif leg.how == "pickle":
        loader = pickle.loads(pickle.dumps(loader))
    if loader.state_dict() != kept or state != kept:
        raise WrongError("state_dict() does not give the loaded state back")
    torch.set_rng_state(stop.rng)
    return loader


def the_rest(
    program: Program, leg: Leg, loader: Any, stop: Stop, is_over: bool
) -> tuple[tuple[list[Any], Any] | None, list[tuple[list[Any], Any]]]:
    loader = resumed(program, leg, loader, stop, is_over)
    # The epoch that was stopped begins now, and the program has to say which it is.
    is_new = bool(stop.state["_iterator_finished"])
    found = []
    for epoch in range(program.epoch + is_over, program.epoch + 3):
        if program.sets_epoch and (epoch > program.epoch or leg.sets_epoch or is_new):
            loader.set_epoch(epoch)
        found.append((list(loader), loader.fingerprint()))
    return (None, found) if is_over else (found[0], found[1:])


def _in_child(call: Callable[[], Any]) -> Any:
    """Returns what a call returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                found: Any = (True, call())
            except BaseException:
                found = (False, traceback.format_exc())
            with os.fdopen(write, "wb") as file:
                pickle.dump(found, file)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    good, value = pickle.loads(data)
    if not good:
        raise WrongError(f"in the child: {value}")
    return value


def fields_of(program: Program, is_rest: bool, whens: list[str]) -> tuple[bool, bool]:
    """Returns which fields of samples are equal, beside number and tag: what was drawn, and the reads."""
    legs = program.legs
    same_size = len({leg.size for leg in legs}) == 1
    drawn = program.seeding == "sample" or (program.seeding == "batch" and same_size)
    # Own batches have another place for each.
    amid = any(when in [*AMID, "bad"] for when in whens)
    reads = (
        same_size and program.in_order and not program.bad
        and not any(leg.is_thread for leg in legs)
        and (not amid or legs[0].workers > 0)
        and not {"bad", "end"} & set(whens)
        # Between two epochs the state has none of the dataset.
        and (program.epoch == 0 or (legs[0].workers > 0 and not legs[0].persistent))
        and (is_rest or all(leg.every == 1 for leg in legs) or not legs[0].persistent)
        # The worker of a batch after an epoch that went on is as before, if the epoch began there.
        and (legs[0].workers <= 1 or is_rest or not legs[0].persistent)
    )  # fmt: skip
    return drawn, reads


def compares_later(program: Program, whens: list[str]) -> bool:
    """True if later epochs are those of a run that was not stopped."""
    legs = program.legs
    if len({leg.persistent for leg in legs}) > 1:
        return False
    # The base seed makes what is drawn. Without a seed it is drawn from the generator of the program.
    of_program = program.draws_from_program or (program.seeding != "torch" and program.seed is None)
    # The generator and the state were not taken at one moment; or the draws come early.
    return not of_program or not (set(whens) & set(AMID) or program.prefetches)


def judge(
    program: Program, expected: list[tuple[list[Any], Any]], candidates: list[list[Any]],
    rest: tuple[list[Any], Any] | None, later: list[tuple[list[Any], Any]], whens: list[str],
) -> None:  # fmt: skip
    legs = program.legs
    same_size = len({leg.size for leg in legs}) == 1
    ordered = program.in_order or all(leg.workers <= 1 for leg in legs)
    if program.draws_from_program and ({"thread", "timer"} & set(whens) or program.prefetches):
        # Draws of a call that runs may be in the program's generator, and not in the state.
        return

    def same(got: list[Any], want: list[Any], is_rest: bool) -> bool:
        drawn, reads = fields_of(program, is_rest, whens)

        def seen(sample: Any) -> tuple[Any, ...]:
            number, draws, tag, count = sample
            return number, draws if drawn else 0, tag, count if reads else 0

        if not ordered:
            pairs = [collections.Counter(seen(one) for one in flat(batches)) for batches in (got, want)]
            if program.drop_last and not same_size:
                return pairs[0] <= pairs[1]
            return pairs[0] == pairs[1]
        pair = [[[seen(one) for one in batch] for batch in batches] for batches in (got, want)]
        if same_size:
            return pair[0] == pair[1]
        pair = [flat(batches) for batches in pair]
        if program.drop_last:
            lost = len(pair[1]) - len(pair[0])
            return 0 <= lost < max(leg.size for leg in legs) and pair[0] == pair[1][: len(pair[0])]
        return pair[0] == pair[1]

    want, its_sum = expected[program.epoch]
    got = [[*seen, *(rest[0] if rest else [])] for seen in candidates]
    if not any(same(one, want, True) for one in got):
        raise WrongError(
            f"rest: seen {short(candidates)}\nthen {short(rest and rest[0])}\nwant {short(want)}"
        )
    bad_left_out = program.bad and not same_size
    if rest and not (program.drop_last and not same_size) and not bad_left_out and rest[1] != its_sum:
        raise WrongError(f"fingerprint {rest[1]}, want {its_sum}")
    if not compares_later(program, whens):
        return
    for number, (one, (found, found_sum)) in enumerate(
        zip(expected[program.epoch + 1 :], later, strict=True), 1
    ):
        if not same(found, one[0], False):
            raise WrongError(f"epoch +{number}: {short(found)}\nwant {short(one[0])}")
        if not (program.drop_last and not same_size) and not bad_left_out and found_sum != one[1]:
            raise WrongError(f"fingerprint of epoch +{number}: {found_sum}, want {one[1]}")


def short(batches: Any) -> str:
    text = repr(batches).replace(", None, None, None", "")
    return text if len(text) < 1500 else text[:1500] + "..."


def failure_of(program: Program, limit: int = 20) -> str | None:
    """Returns how a program fails, or None."""

    def hung(*_: Any) -> None:
        raise TimeoutError(f"hung for {limit} s")

    previous = signal.signal(signal.SIGALRM, hung)
    signal.alarm(limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(program)
        return None
    except WrongError as error:
        return f"Wrong {error}"
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        return f"{type(error).__name__} {error}\n" + "\n".join(lines[-14:])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        parts.Hook.call = None


def simpler(program: Program) -> Iterator[Program]:
    """Yields programs that are one step simpler."""
    default = Program()
    for field in dataclasses.fields(Program):
        if field.name in ("number", "legs", "dataset"):
            continue
        value = getattr(default, field.name)
        if getattr(program, field.name) != value:
            yield dataclasses.replace(program, **{field.name: value})
    if program.dataset == "counting map":
        yield dataclasses.replace(program, dataset="map")
    if program.epoch > 1:
        yield dataclasses.replace(program, epoch=1)
    legs = program.legs
    for at in range(len(legs)):
        if len(legs) > 2:
            yield dataclasses.replace(program, legs=legs[:at] + legs[at + 1 :])
        for field in dataclasses.fields(Leg):
            value = getattr(Leg(), field.name)
            if getattr(legs[at], field.name) != value:
                leg = dataclasses.replace(legs[at], **{field.name: value})
                yield dataclasses.replace(program, legs=(*legs[:at], leg, *legs[at + 1 :]))
    for name in ("workers", "size", "persistent", "is_thread", "every"):
        value = getattr(Leg(), name)
        yield dataclasses.replace(
            program, legs=tuple(dataclasses.replace(leg, **{name: value}) for leg in legs)
        )
    if any(leg.workers > 1 for leg in legs):
        yield dataclasses.replace(program, legs=tuple(dataclasses.replace(leg, workers=1) for leg in legs))


def is_sound(program: Program) -> bool:
    """True if a program that was made simpler can be run."""
    legs = program.legs
    kept = ("workers", "is_thread", "size", "every", "persistent")
    for at, leg in enumerate(legs):
        if not leg.workers and (leg.persistent or leg.is_thread):
            return False
        if leg.workers and program.prefetches and not leg.persistent:
            return False
        if leg.how == "same" and (at == 0 or any(getattr(leg, n) != getattr(legs[at - 1], n) for n in kept)):
            return False
    return excluded(program) is None


def shrunk(program: Program, until: float) -> tuple[Program, str]:
    """Returns the simplest program found that fails as this one does."""
    failure = failure_of(program) or "did not fail again"
    kind = failure.split(" ")[0]
    goes_on = True
    while goes_on and time.time() < until:
        goes_on = False
        for candidate in simpler(program):
            if candidate == program or not is_sound(candidate) or time.time() > until:
                continue
            found = failure_of(candidate)
            if found is not None and found.split(" ")[0] == kind:
                program, failure, goes_on = candidate, found, True
                break
    return program, failure


def text_of(program: Program) -> str:
    """Returns what differs from the simplest program."""

    def differing(one: Any, default: Any) -> str:
        return ", ".join(
            f"{field.name}={getattr(one, field.name)!r}" for field in dataclasses.fields(one)
            if field.name != "legs" and getattr(one, field.name) != getattr(default, field.name)
        )  # fmt: skip

    legs = "; ".join(f"Leg({differing(leg, Leg())})" for leg in program.legs)
    return f"Program({differing(program, Program())}) {legs}"


def main(first: int, last: int) -> None:
    logging.getLogger("ringloader").setLevel(logging.ERROR)
    failed = 0
    for number in range(first, last):
        program = made(number)
        failure = failure_of(program)
        if failure is not None:
            failed += 1
            small, text = shrunk(program, time.time() + 15)
            print(f"=== {number}: {text_of(small)}\n{text}\n--- first: {failure[:200]}", flush=True)  # noqa: T201
        if number % 100 == 0:
            gc.collect()
            print(f"... {number}, failed {failed}", flush=True)  # noqa: T201
    print(f"ran {last - first}, failed {failed}")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
