"""The actors of ``Workers``: lent to one iterator after another, as handles that look like processes.

What they need of their cluster is here too.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.util.client
from ray.exceptions import RayActorError, RayError

import ringloader._native as _native
from ringloader._features.pools.objects import LoaderObjects
from ringloader._ray.actor import Assignment, Birth, RayRecord, Worker, versions

# Characters of Ray's words for the end of an actor.
_LONGEST = 300


class Actor:
    """One actor, which may still wait for room in the cluster.

    Args:
        options: What it asks for.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._made_over = connection()
        # After a restart Ray would run its tasks in any order, without the state of the loop.
        made = ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **options)
        self.handle = made.remote()
        self._birth: concurrent.futures.Future[Birth] = self.handle.birth.remote().future()
        # Of the records that it holds, or has been sent.
        self.numbers: set[int] = set()
        # The number of times that it was given work.
        self.assignments = 0

    @property
    def birth(self) -> Birth | None:
        """The actor's first answer; None before it lives.

        Raises:
            RuntimeError: If it cannot work with this process.
        """
        if not self._birth.done() or self._birth.exception() is not None:
            return None
        birth, ours = self._birth.result(), versions()
        for name, version in ours.items():
            if birth.versions[name] != version:
                raise RuntimeError(
                    f"the worker on {birth.node} has {name} {birth.versions[name]}, and the main process "
                    f"{version}: both must have the same version"
                )
        return birth

    def has_failed(self) -> BaseException | None:
        """Returns why it has not come to life, if it never will."""
        return self._birth.exception() if self._birth.done() else None

    def has_gone(self) -> bool:
        """True if this program has left the cluster that has the actor."""
        # Ray may be shut down meanwhile.
        with contextlib.suppress(Exception):
            return connection() != self._made_over
        return True

    def check(self) -> None:
        """Raises a ``RuntimeError`` if it has gone."""
        if self.has_gone():
            raise RuntimeError(
                "the actors of this iterator have gone: ray.shutdown() has left their cluster; make another "
                "iterator"
            )

    def kill(self) -> None:
        """Ends it at once."""
        if not self.has_gone():
            with contextlib.suppress(Exception):
                ray.kill(self.handle, no_restart=True)


class ActorWorker:
    """An actor at one iterator, as torch's iterator uses process objects.

    Args:
        actor: The actor.
        assignment: Its work.
        when_ended: Called with words that say how, once it has ended its work. From any thread.
        crew: Takes the actor back, once it may work for another iterator.
    """

    daemon = True

    def __init__(
        self,
        actor: Actor,
        assignment: Assignment,
        when_ended: Callable[[str], None],
        crew: Crew,
    ) -> None:
        self.actor = actor
        # None once the actor was given back.
        self._crew: Crew | None = crew
        self._done: concurrent.futures.Future[bool] = actor.handle.run.remote(assignment).future()
        self._done.add_done_callback(lambda done: when_ended(_how_it_ended(done)))

    @property
    def pid(self) -> int | None:
        """The id of its process on its machine; None before it lives."""
        birth = self.actor.birth
        return None if birth is None else birth.pid

    @property
    def node(self) -> str:
        """The address of its machine, in words."""
        birth = self.actor.birth
        return "no node yet" if birth is None else birth.node

    @property
    def name(self) -> str:
        return f"ringloader worker on {self.node}"

    def is_alive(self) -> bool:
        self._settle()
        return not self._done.done()

    @property
    def exitcode(self) -> int | None:
        """None while it works, 0 once it has ended as it should, else 1."""
        self._settle()
        return None if not self._done.done() else int(self._done.exception() is not None)

    def failure(self) -> BaseException | None:
        """Returns the error that ended it, if one did."""
        return self._done.exception() if self._done.done() else None

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended its work."""
        with contextlib.suppress(concurrent.futures.TimeoutError, TimeoutError, RayError):
            self._done.exception(timeout)
        self._settle()

    def _settle(self) -> None:
        """Gives the actor back once it has ended its work as it should."""
        if self._crew is None or not self._done.done():
            return
        crew, self._crew = self._crew, None
        if self._done.exception() is None and self._done.result():
            crew.give_back(self.actor)
        else:
            crew.discard(self.actor)

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._settle()
        if self._crew is not None:
            crew, self._crew = self._crew, None
            crew.discard(self.actor)

    def close(self) -> None:
        """Does nothing: the actor is Ray's."""


def _how_it_ended(done: concurrent.futures.Future[bool]) -> str:
    error = done.exception()
    if error is None:
        return "it has ended its work"
    # The last line says why.
    text = str(error).strip().rpartition("\n")[2][:_LONGEST]
    if isinstance(error, RayActorError):
        return f"its actor has died ({text})"
    return f"an error has ended it ({text})"


class Crew:
    """All actors, in one process.

    Args:
        num_workers: The most that one iterator has.
        options: What each actor asks for.
    """

    _process_identity = staticmethod(_native.process_identity)

    def __init__(self, num_workers: int, options: Mapping[str, Any]) -> None:
        self.num_workers = num_workers
        self.options = dict(options)
        self.records = LoaderObjects(RayRecord)
        self.is_shut_down = False
        self._owner = self._process_identity()
        # Of the last iterator: another one has neither the actors nor the records.
        self._connection: tuple[str, str] | None = None
        # Appended to and taken from by any thread, and by finalizers.
        self._idle: collections.deque[Actor] = collections.deque()
        self._lent: set[Actor] = set()

    def is_inherited(self) -> bool:
        """True if this process is a forked child of the one that made the crew."""
        return self._process_identity() != self._owner

    def connect(self) -> None:
        """Connects to a cluster for another iterator, if the program is in none.

        Raises:
            RuntimeError: If it is shut down, in a forked child, and for a program that uses Ray Client.
        """
        self.check_open()
        connect()
        now = connection()
        if now != self._connection:
            self._connection = now
            self._idle.clear()
            self.records = LoaderObjects(RayRecord)

    def check_open(self) -> None:
        """Raises a ``RuntimeError`` once it is shut down, and in a forked child."""
        if self.is_inherited():
            raise RuntimeError(
                "Workers on a cluster cannot be used in a forked process, because Ray cannot: make them in "
                "this process"
            )
        if self.is_shut_down:
            raise RuntimeError(
                "the Workers of this loader were shut down: make its iterators inside "
                "`with workers:` and before workers.shutdown(), or make others"
            )

    def take(self, record: int | None = None) -> Actor:
        """Returns an idle actor, one that holds the record if there is one, or a new one."""
        actor = self._taken(record)
        self._lent.add(actor)
        return actor

    def _taken(self, record: int | None) -> Actor:
        with contextlib.suppress(ValueError):
            for actor in list(self._idle):
                if record in actor.numbers:
                    self._idle.remove(actor)
                    return actor
        try:
            return self._idle.pop()
        except IndexError:
            return Actor(self.options)

    def give_back(self, actor: Actor) -> None:
        """Takes back an actor that has nothing to do. Called from anywhere."""
        self._lent.discard(actor)
        has_room = len(self._idle) < 2 * self.num_workers
        if self.is_shut_down or self.is_inherited() or actor.has_gone() or not has_room:
            actor.kill()
        else:
            self._idle.append(actor)

    def discard(self, actor: Actor) -> None:
        """Ends an actor that is of no use."""
        self._lent.discard(actor)
        actor.kill()

    def end(self) -> None:
        """Ends all actors. Called from a finalizer too: the pool has gone."""
        if self.is_inherited():
            return
        self.is_shut_down = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().kill()
        for actor in list(self._lent):
            actor.kill()
        self._lent.clear()
        self.records = LoaderObjects(RayRecord)


def wait_until(seconds: float) -> Callable[[], float]:
    """Returns a function of the seconds that are left from now on."""
    until = time.monotonic() + seconds
    return lambda: until - time.monotonic()


def connect() -> None:
    """Connects to a cluster, or starts one, if this program has none.

    Raises:
        RuntimeError: If the program uses Ray Client: it is not in the cluster.
    """
    from ray.util.client import ray as client

    if client.is_connected():
        raise RuntimeError(
            "Workers on a cluster cannot be used over Ray Client (ray://): workers connect to this program; "
            "run it in the cluster, such as by `ray job submit`"
        )
    if not ray.is_initialized():
        ray.init()


def connection() -> tuple[str, str] | None:
    """Returns the node and the job of this program; None if it is in no cluster.

    Ask before a call to Ray that must not connect: most calls do, and may start a cluster.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def address_of(host: str | None) -> str:
    """Returns the IP address at which the main process listens.

    Args:
        host: The address or name that was given; None for that of this node.

    Raises:
        ValueError: If there is no such host.
    """
    name = ray.util.get_node_ip_address() if host is None else host
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(
            f"host={host!r} is not known ({error}); pass an IP address of this machine"
        ) from error
