"""Workers of the start method ``spawn``, forked from a server that has imported torch already.

One server for the process, started when the first loader that will spawn is made, and ended with the last
one. A worker has what a spawned one has; where that cannot be promised, it is spawned.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from multiprocessing import context, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from typing import Any

from ringloader._start import spawn_keeper, spawn_server
from ringloader._start.spawn_client import NoWorkerError, RefusedError

SWITCH = "RINGLOADER_SPAWN_SERVER"


class _Popen(popen_spawn_posix.Popen):
    """A worker from the server, as `Process` objects know it: as one that was spawned."""

    DupFd = spawn_server.SentFd  # type: ignore[assignment]

    def duplicate_for_child(self, fd: int) -> int:
        self._fds: list[int]
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        """MIRRORS multiprocessing popen_spawn_posix.py::_launch."""
        tracker = resource_tracker.getfd()
        assert tracker is not None
        preparation = spawn.get_preparation_data(process_obj._name)
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        with contextlib.ExitStack() as ours:
            sentinel, ended = os.pipe()
            close_ours = ours.enter_context(_closed_on_error(sentinel))
            with _closed(ended):
                theirs, feed = os.pipe()
                close_ours.append(feed)
                with _closed(theirs):
                    self.pid = spawn_keeper.keeper.fork([0, 1, 2, theirs, ended, tracker, *self._fds])
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (sentinel, feed))  # type: ignore[attr-defined]
        with open(feed, "wb", closefd=False) as file:
            file.write(data.getbuffer())


@contextlib.contextmanager
def _closed(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _closed_on_error(*fds: int) -> Iterator[list[int]]:
    all_fds = list(fds)
    try:
        yield all_fds
    except BaseException:
        for fd in all_fds:
            os.close(fd)
        raise


def _spawns(kind: Any) -> bool:
    """Whether processes of this class are spawned by nothing but multiprocessing's own code."""
    if kind is context.Process:
        # Of the default context, whatever that is by now.
        kind = getattr(context._default_context._actual_context, "Process", None)  # type: ignore[attr-defined]
    return (
        kind is context.SpawnProcess
        and kind._Popen.__module__ == context.__name__
        and popen_spawn_posix.Popen.__module__ == popen_spawn_posix.__name__
        and popen_spawn_posix.Popen._launch.__module__ == popen_spawn_posix.__name__  # type: ignore[attr-defined]
    )


def _is_allowed() -> bool:
    me = process.current_process()
    return (
        os.environ.get(SWITCH) != "0"
        and not getattr(sys, "frozen", False)
        # The main module of a child, while it is imported, may start nothing; a daemon never.
        and not getattr(me, "_inheriting", False)
        and not me.daemon
    )


def prepare(loader: Any) -> None:
    """Has the server ready when the loader's workers start, if they are to be spawned."""
    if loader.num_workers > 0 and _is_allowed():
        found = loader.multiprocessing_context
        if _spawns(context.Process if found is None else getattr(found, "Process", None)):
            with contextlib.suppress(RefusedError):
                spawn_keeper.keeper.keep_for(loader)


def forget(loader: Any) -> None:
    """The server need not stay for this loader until its next workers start."""
    spawn_keeper.keeper.leave(loader)


def by_server(process_obj: Any) -> Any:
    """Has a process that would be spawned started by the server, if there is one."""
    if _spawns(type(process_obj)) and _is_allowed():

        def popen(_process: Any) -> Any:
            # An attribute of the instance would travel with it.
            del process_obj._Popen
            try:
                return _Popen(process_obj)
            except NoWorkerError:
                return process_obj._Popen(process_obj)

        process_obj._Popen = popen
    return process_obj
