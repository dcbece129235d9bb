"""A function that the main process has a worker call, between two of its batches."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

from torch.utils.data import get_worker_info

from ringloader._torch import internals

# Of an answer: it stands before it.
LENGTH = struct.Struct("<Q")


class Call:
    """On its way to a worker, among its tasks. It answers on a socket: no batch has to make way for that.

    Args:
        address: Of the socket, on which the main process waits.
        function: The function and its arguments, pickled.
    """

    def __init__(self, address: bytes, function: bytes) -> None:
        self._address = address
        self._function = function

    def __call__(self) -> None:
        answer = self._answer()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._address)
                connection.sendall(LENGTH.pack(len(answer)))
                connection.sendall(answer)
        except OSError:
            # The main process no longer waits for it.
            pass

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
    """For an error whose own type cannot be sent."""
    try:
        raise RuntimeError(f"the function called in the worker failed: {failed}")
    except RuntimeError:
        wrapped: Any = internals.ExceptionWrapper(where=where)
        return pickle.dumps(wrapped, pickle.HIGHEST_PROTOCOL)
