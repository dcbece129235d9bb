"""A case, and the parts that its program is given."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.proc import wait_until

ALL_METHODS = ("fork", "spawn", "forkserver")
WORKER_LOST = r"DataLoader worker \(pid"


class Skip(Exception):  # noqa: N818  (it is no error)
    """The machine cannot do what the case needs."""


class Wrong(Exception):  # noqa: N818  (asserts of a program must not be left out by `python -O`)
    """An error for what must hold and does not."""


def must(holds: object, said: str) -> None:
    if not holds:
        raise Wrong(said)


def _words(error: BaseException) -> str:
    """Returns an error's class, text, notes and causes."""
    try:
        text = str(error)
    except Exception:
        text = ""
    words = [type(error).__name__, text, *getattr(error, "__notes__", ())]
    words += [_words(inner) for inner in (error.__cause__, *getattr(error, "exceptions", ())) if inner]
    return "\n".join(words)


class Program:
    """Tools for the function of a case, in a process of its own."""

    def __init__(self, ours: bool, method: str, folder: Path) -> None:
        self.ours = ours
        self.method = method
        self.folder = folder
        self.figure = ""

    def loader(self, dataset: Any, *, ours: dict[str, Any] | None = None, **options: Any) -> Any:
        """A loader of the class under test. The options in `ours` are left out of torch's."""
        if self.ours:
            from ringloader import DataLoader

            return DataLoader(dataset, **self._started(options), **(ours or {}))
        from torch.utils.data import DataLoader as Torchs

        return Torchs(dataset, **self._started(options))

    def _started(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("num_workers"):
            options.setdefault("multiprocessing_context", self.method)
        return options

    @property
    def note(self) -> NotePid:
        """A `worker_init_fn` by which `pids` knows the workers."""
        return NotePid(self.folder)

    def pids(self, count: int = 1) -> list[int]:
        """Ids of the workers that have begun, in the order of their starts, once there are `count`."""

        def noted() -> list[Path]:
            return sorted(self.folder.glob("worker.*"), key=lambda path: path.stat().st_mtime_ns)

        must(wait_until(lambda: len(noted()) >= count, 60), "the workers do not begin")
        return [int(path.suffix[1:]) for path in noted()]

    @contextmanager
    def within(self, seconds: float, what: str = "it") -> Iterator[None]:
        """The block takes no longer, or four times as long where workers import torch. It is the figure."""
        if self.method != "fork":
            seconds *= 4
        began = time.monotonic()
        try:
            yield
        except Wrong:
            raise
        except BaseException:
            self._took(began, seconds, what)
            raise
        self._took(began, seconds, what)

    def _took(self, began: float, seconds: float, what: str) -> None:
        took = time.monotonic() - began
        self.figure = f"{took:.2f} s"
        must(took <= seconds, f"{what} took {took:.1f} s, and {seconds:g} s are allowed")

    @contextmanager
    def raises(
        self, kinds: type[BaseException] | tuple[type[BaseException], ...], *texts: str, seconds: float = 20
    ) -> Iterator[list[str]]:
        """The block raises an error of this class whose message or notes have all the texts, in time."""
        import re

        caught: list[str] = []
        with self.within(seconds, "the error"):
            try:
                yield caught
            except BaseException as error:
                if isinstance(error, Wrong) or not isinstance(error, kinds):
                    raise
                caught.append(_words(error))
                error.__traceback__ = None
        must(caught, f"no {kinds} was raised")
        for text in texts:
            must(re.search(text, caught[0]), f"the error does not say {text!r}: {caught[0][-300:]}")


class NotePid:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        (self.folder / f"worker.{os.getpid()}").write_text(str(worker))


@dataclass(frozen=True)
class Case:
    name: str
    """`topic/what`, and `-spawn` or `-forkserver` behind it."""
    run: Callable[[Program], None]
    method: str
    limit: float
    """Seconds, from the start of the program to its end."""
    grace: float
    """Seconds from the end of the program to that of the last process of it."""
    ends: int
    """The exit code that the program must have; negative: the signal that ends it."""
    tracebacks: int | None
    """The number that it must print; `None`: any number."""
    fast: bool
    """True if it is a case that `make test` runs."""
    known: tuple[str, str] | None
    """The reason why ringloader's loader fails it; empty if it should not."""

    @property
    def must_hold(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


CASES: dict[str, Case] = {}


def case(
    *,
    methods: tuple[str, ...] = ("fork",),
    limit: float = 40,
    grace: float = 2,
    ends: int = 0,
    tracebacks: int | None = None,
    fast: bool = False,
    known: tuple[str, str] | None = None,
    name: str = "",
) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    """Makes a function a case, one for each start method. Its docstring says what must hold."""

    def add(run: Callable[[Program], None]) -> Callable[[Program], None]:
        topic = run.__module__.rpartition(".")[2]
        words = (name or run.__name__).replace("_", "-")
        for method in methods:
            # Python's own server ends by itself, after its interpreter.
            after = grace + 2 * (method == "forkserver")
            full = f"{topic}/{words}" + ("" if method == "fork" else f"-{method}")
            if full in CASES:
                raise ValueError(f"two cases have the name {full}")
            CASES[full] = Case(
                full,
                run,
                method,
                limit if method == "fork" else 2 * limit,
                after,
                ends,
                tracebacks,
                fast and method == "fork",
                known,
            )
        return run

    return add
