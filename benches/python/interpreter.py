"""Calls in another environment's Python, for a package that this one's cannot have.

There it runs as ``python -m benches.python.interpreter``: a request is a line of JSON on its standard input,
the answer one on its standard output. Each call has a process of its own, as here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .processes import ProcessFailedError, call_in_process, named

ROOT = Path(__file__).resolve().parents[2]
# The advice of the documentation of dataloader-rs for arrays on glibc's malloc.
TUNABLES = "glibc.malloc.trim_threshold=67108864:glibc.malloc.mmap_threshold=33554432"


class Interpreter:
    """Another Python, started at the first call."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def call(self, method: str, function: str, *arguments: Any) -> Any:
        """As ``call_in_process`` for ``named``; arguments and result are what JSON has.

        Raises:
            ProcessFailedError: with what the call raised, or that the interpreter ended.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, "-m", __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "GLIBC_TUNABLES": TUNABLES},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, function, *arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ProcessFailedError(f"{self._python} ended with exit code {self._process.wait()}")
        error, result = json.loads(answer)
        if error is not None:
            raise ProcessFailedError(error)
        return result

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def serve() -> None:
    """Answers until standard input ends."""
    # Output of a package must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        method, function, *arguments = json.loads(line)
        try:
            answer = (None, call_in_process(method, named, function, *arguments))
        except ProcessFailedError as error:
            answer = (str(error), None)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
