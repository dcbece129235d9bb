"""A function that the main process has a worker call, between two of its batches."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from typing import Any

from torch.utils.data import get_worker_info

from ringloader._torch import internals, stand_ins

# The length of an answer, which stands before it.
LENGTH = struct.Struct("<Q")


class Call:
    """On its way to a worker, among its tasks. It answers on a pipe: no batch has to make way for that.

    Args:
        function: The function and its arguments, pickled.
        tag: Of the descriptor of that pipe, which is sent to the worker beside it.
    """

    def __init__(self, function: bytes, tag: int) -> None:
        self._tag = tag
        self._function = function

    def __call__(self) -> None:
        answer = self._answer()
        port = stand_ins.port
        assert port is not None
        # If the descriptor cannot be had, the pipe ends, which tells the main process. The main process may
        # have stopped waiting.
        with (
            contextlib.suppress(OSError, RuntimeError),
            os.fdopen(port.receive_fd(self._tag), "wb", buffering=0) as pipe,
        ):
            for part in (LENGTH.pack(len(answer)), answer):
                left = memoryview(part)
                while left:
                    left = left[pipe.write(left) :]

    def _answer(self) -> bytes:
        info = get_worker_info()
        assert info is not None
        where = f"in DataLoader worker process {info.id}"
        try:
            function, args = pickle.loads(self._function)
            result = function(info.dataset, *args)
            return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            wrapped = internals.ExceptionWrapper(where=where)
        try:
            return pickle.dumps(wrapped, pickle.HIGHEST_PROTOCOL)
        except Exception:
            return _text(where, failed)


def _text(where: str, failed: str) -> bytes:
    """Returns an answer for an error whose own type cannot be sent."""
    try:
        raise RuntimeError(f"the function called in the worker failed: {failed}")
    except RuntimeError:
        wrapped: Any = internals.ExceptionWrapper(where=where)
        return pickle.dumps(wrapped, pickle.HIGHEST_PROTOCOL)
