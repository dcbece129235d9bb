"""Which server for ``spawn`` there is, for how long, and whether another one is tried."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ringloader._start import inherited
from ringloader._start.spawn_client import LostError, NoWorkerError, RefusedError, Server, UselessError

_logger = logging.getLogger("ringloader")

# Servers that are lost in a row, until no more are tried.
_LOST_AT_MOST = 2


class Keeper:
    """The server of this process, and the loaders for whom it is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._server: Server | None = None
        self._users: dict[int, weakref.finalize[Any, Any]] = {}
        # Since the last worker that came from one.
        self._lost = 0
        # One that did not come to work at all is not tried again.
        self._useless = False

    def keep_for(self, loader: Any) -> None:
        """Starts the server, if there is none. It stays for as long as the loader does."""
        with self._held():
            if id(loader) not in self._users:
                ended = weakref.finalize(loader, self._drop, id(loader))
                ended.atexit = False
                self._users[id(loader)] = ended
            self._current()

    def leave(self, loader: Any) -> None:
        """As if the loader had gone. :meth:`keep_for` has it back."""
        ended = self._users.get(id(loader))
        if ended is not None:
            ended()

    def _drop(self, user: int) -> None:
        self._users.pop(user, None)
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        # Garbage is collected anywhere, also where the lock is held: its holder looks afterwards.
        if not self._users and self._lock.acquire(blocking=False):
            try:
                if not self._users:
                    self._end()
            finally:
                self._lock.release()

    def end_at_exit(self) -> None:
        """No loader starts workers any more; if one does nevertheless, there is a server again."""
        self._users.clear()
        self._end_if_unused()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            # In a signal's handler, while this thread waits for the server.
            raise RefusedError("the server is being asked already")
        try:
            with self._lock:
                self._holder = threading.get_ident()
                try:
                    yield
                finally:
                    self._holder = None
        finally:
            self._end_if_unused()

    def _current(self) -> Server | None:
        """The server with this process's environment, which may still import."""
        if self._useless:
            return None
        try:
            state = inherited.state()
            server = self._server
            if server is not None and not server.is_running():
                # While it was idle; if while it started, it may have said why.
                if self._check(server):
                    self._note_lost("it has ended")
            elif server is not None and server.state != state:
                self._end()
            if self._server is None and not self._useless:
                self._server = Server()
        except OSError as error:
            self._give_up(str(error))
        return self._server

    def _check(self, server: Server) -> bool:
        """Waits until the server can be used. False: it cannot, and is not there any more."""
        try:
            server.wait_until_ready()
        except UselessError as error:
            self._give_up(str(error))
        except LostError as error:
            self._note_lost(str(error))
        else:
            return True
        return False

    def _note_lost(self, why: str) -> None:
        self._end()
        self._lost += 1
        if self._lost >= _LOST_AT_MOST:
            self._give_up(f"{self._lost} servers in a row were lost, the last one thus: {why}")

    def _give_up(self, why: str) -> None:
        _logger.info("workers are spawned one by one: %s", why)
        self._useless = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def fork(self, fds: list[int]) -> int:
        """A new child of this process from the server, or `NoWorkerError`."""
        with self._held():
            while (server := self._current()) is not None:
                try:
                    if self._check(server):
                        worker = server.fork(fds)
                        self._lost = 0
                        return worker
                except RefusedError:
                    raise
                except LostError as error:
                    self._note_lost(str(error))
                except BaseException:
                    self._end()
                    raise
            raise NoWorkerError

    def forget(self) -> None:
        """In a forked child: the server is not this process's."""
        server, self._server = self._server, None
        if server is not None:
            server.forget()


keeper = Keeper()


def _begin_anew() -> None:
    """In a forked child. The lock of the parent's keeper may be held for ever here."""
    global keeper
    keeper.forget()
    keeper = Keeper()


atexit.register(lambda: keeper.end_at_exit())
os.register_at_fork(after_in_child=_begin_anew)
