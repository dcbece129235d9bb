"""The shorter ones of `python -m chaos.soak`: what a process has does not grow."""

from __future__ import annotations

from chaos import soak
from chaos.case import Program, case


def _flat(program: Program, name: str, count: int) -> None:
    made = soak.KINDS[name](program)
    series = soak.Series(running=soak.RUNNING.get(name, 0))
    warm = max(3, count // 5)
    for done in range(count):
        if done == warm or (done > warm and (done - warm) % max(1, count // 10) == 0):
            series.take(done)
        next(made)
    series.take(count)
    made.close()  # type: ignore[attr-defined]
    program.figure = f"{count} times"
    series.must_be_flat()


@case(limit=120)
def abandoned_iterators(program: Program) -> None:
    """60 iterators are abandoned after a batch: nothing grows."""
    _flat(program, "abandoned", 60)


@case(limit=120)
def loaders(program: Program) -> None:
    """60 loaders run an epoch: nothing grows."""
    _flat(program, "loaders", 60)


@case(limit=120)
def epochs(program: Program) -> None:
    """60 epochs of one loader: nothing grows."""
    _flat(program, "epochs", 60)


@case(limit=120)
def persistent_epochs(program: Program) -> None:
    """100 epochs of one loader with persistent workers: nothing grows."""
    _flat(program, "persistent", 100)


@case(limit=120)
def errors(program: Program) -> None:
    """60 epochs that end by an error: nothing grows."""
    _flat(program, "errors", 60)


@case(limit=120)
def restarts(program: Program) -> None:
    """60 workers are killed and, with `restart_workers`, replaced: nothing grows."""
    _flat(program, "restarts", 60)
