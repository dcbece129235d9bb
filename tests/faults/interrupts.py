"""A signal handler that raises, at a chosen bytecode of some files."""

from __future__ import annotations

import sys
from collections.abc import Collection


class InterruptError(BaseException):
    pass


class Interrupting:
    """Traces this thread, and raises at the bytecode of that number. Without a number it counts them.

    Args:
        files: Only bytecodes of these files count.
        number: Where it raises.
    """

    def __init__(self, files: Collection[str | None], number: int | None = None) -> None:
        self.files, self.number, self.seen, self.where = files, number, 0, None

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, _event, _argument):
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame, event, _argument):
        if event == "opcode":
            if self.seen == self.number and self.where is None:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise InterruptError
            self.seen += 1
        return self._opcode
