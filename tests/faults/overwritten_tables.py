"""A program: overwrites each byte of the tables of batches in shared memory, and takes the batches.

It must not die. What is taken is read to its end: a tensor that lay outside the mapping would end it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from parity.describe import describe
from ringloader import _native

Pair = collections.namedtuple("Pair", ["x", "y"])

_ROWS = torch.arange(4096, dtype=torch.int32)
BATCHES: list[Any] = [
    [
        torch.arange(5000.0).reshape(50, 100).t(),
        torch.tensor([1, 2]),
        torch.zeros(0, 3),
        _ROWS.untyped_storage(),
    ],
    {"a": np.arange(6, dtype="<f8").reshape(2, 3), "b": np.array(["x", "yz"]), "c": b"bytes" * 2000},
    Pair([_ROWS[:100], _ROWS[50:]], (1, 2.5, None, True, "text", b"few")),
    [np.asfortranarray(np.arange(4096.0).reshape(64, 64)), {"deep": [("same", "same")]}],
]
_MAGIC = b"RLmb"
# And one bit each, and a random byte. The letters make dtypes of objects, whose items are addresses.
_VALUES = (0, 255, ord("O"), ord("T"), ord("|"))
_SEED = 1
# A table that asks for more is refused by the system, and not by the machine's end.
_ADDRESS_SPACE = 16 << 30


def opened() -> int:
    """The shared memory, as a file."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/memfd:ringloader "):
                return os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise AssertionError("there is no shared memory")


def find_table(file: int, generation: int) -> int:
    """Returns where the table of this filling begins. Holes are left out."""
    at, wanted = 0, _MAGIC + bytes([2, 0, 0, 0]) + generation.to_bytes(8, "little")
    while True:
        start = os.lseek(file, at, os.SEEK_DATA)
        at = os.lseek(file, start, os.SEEK_HOLE)
        found = os.pread(file, at - start, start).rfind(wanted)
        if found >= 0:
            return start + found


def length(header: bytes) -> int:
    storages, leaves, dims, tags = (int.from_bytes(header[at : at + 4], "little") for at in (16, 20, 24, 28))
    return 40 + 16 * storages + 32 * leaves + 8 * dims + tags + int.from_bytes(header[32:40], "little")


def touch(value: Any) -> None:
    """Reads all of it: what has an end is copied, of what repeats itself too often the first and the last."""
    if isinstance(value, torch.Tensor):
        if value.numel() < 1 << 20:
            value.clone()
        else:
            value[(-1,) * value.dim()].item()
            value[(0,) * value.dim()].item()
    elif isinstance(value, np.ndarray):
        if value.size < 1 << 20:
            value.tolist()
    elif isinstance(value, torch.UntypedStorage):
        bytes(value.tolist())
    elif isinstance(value, dict):
        for key, item in value.items():
            touch(key)
            touch(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            touch(item)
    else:
        repr(value)


class Tables:
    def __init__(self) -> None:
        self.engine = _native.Engine(1, 8, 64 << 20)
        self.port = _native.Port.inherit(self.engine, 0)
        self.file = opened()
        self.fillings = 0
        self.counts: collections.Counter[str] = collections.Counter()

    def send(self, batch: Any) -> int:
        """Sends a batch; returns where its table begins."""
        self.fillings += 1
        self.engine.put(0, (self.fillings, [0]))
        assert self.port.get()[0] == self.fillings
        self.port.put((self.fillings, batch))
        return find_table(self.file, self.fillings)

    def take(self, expected: Any) -> None:
        """Takes the batch. Counts what came of it, without a look at the content of what differs."""
        try:
            number, taken = self.engine.next(0.0)
            assert number == self.fillings
            if isinstance(taken, ExceptionWrapper):
                taken.reraise()
            touch(taken)
        except Exception as error:
            self.counts[type(error).__name__] += 1
            return
        try:
            same = describe(taken) == expected
        except Exception:
            same = False
        self.counts["equal" if same else "another batch"] += 1

    def overwrite(self, batch: Any, offset: int, value: int, expected: Any) -> None:
        at = self.send(batch) + offset
        os.pwrite(self.file, bytes([value]), at)
        sys.stderr.write(f"byte {offset}: {value}\n")
        self.take(expected)


def main(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    # numpy warns of names of dtypes that it takes for old ones.
    warnings.simplefilter("ignore")
    chance, tables, deadline = random.Random(_SEED), Tables(), time.monotonic() + seconds
    cases = []
    for batch in BATCHES:
        at = tables.send(batch)
        table = os.pread(tables.file, length(os.pread(tables.file, 40, at)), at)
        expected = describe(batch)
        tables.take(expected)
        for offset, byte in enumerate(table):
            values = {*_VALUES, *(byte ^ 1 << bit for bit in range(8)), chance.randrange(256)} - {byte}
            cases += [(batch, offset, value, expected) for value in sorted(values)]
    assert tables.counts["equal"] == len(BATCHES), tables.counts
    # The cases for which there is time are from all places.
    chance.shuffle(cases)
    done = 0
    for case in cases:
        tables.overwrite(*case)
        done += 1
        if time.monotonic() > deadline:
            break
    # The writes before have spoilt nothing for later batches.
    tables.counts["equal"] = 0
    for batch in BATCHES:
        tables.send(batch)
        tables.take(describe(batch))
    assert tables.counts["equal"] == len(BATCHES), tables.counts
    tables.engine.close()
    refused = sum(count for name, count in tables.counts.items() if name[0].isupper())
    sys.stdout.write(f"{done} of {len(cases)} overwritten, {refused} refused: {dict(tables.counts)}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
