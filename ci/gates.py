#!/usr/bin/env python3
"""Runs gates of the Makefile in lanes beside each other, and says what each took.

``ci/gates.py LANE...``: a lane is one argument, targets with spaces between, which run one after the other.
A gate that fails stops no other. What a gate printed comes when it has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """A gate that has run."""

    name: str
    seconds: float
    processor_seconds: float
    code: int

    def __str__(self) -> str:
        said = "passed" if self.code == 0 else f"FAILED ({self.code})"
        took = f"{self.seconds:6.0f} s {self.processor_seconds:6.0f} s of processor time"
        return f"{self.name:14} {took}  {said}"


def run(lane: list[str], ended: list[Ended], printing: threading.Lock) -> None:
    """Runs the gates of one lane."""
    for name in lane:
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            command = ["make", "--no-print-directory", name]
            make = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(make.pid, 0)
            make.returncode = os.waitstatus_to_exitcode(status)
            gate = Ended(name, time.monotonic() - began, used.ru_utime + used.ru_stime, make.returncode)
            ended.append(gate)
            printed.seek(0)
            with printing:
                print(f"{printed.read()}{gate}", flush=True)


def main(lanes: list[list[str]]) -> int:
    """Runs all lanes, and returns the exit code: 0 where no gate failed."""
    began = time.monotonic()
    ended: list[Ended] = []
    printing = threading.Lock()
    threads = [threading.Thread(target=run, args=(lane, ended, printing)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [gate.name for gate in ended if gate.code != 0]
    print("", *sorted(map(str, ended)), sep="\n")
    print(f"{len(ended)} gates in {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed or not ended else 0


if __name__ == "__main__":
    sys.exit(main([lane.split() for lane in sys.argv[1:]]))
