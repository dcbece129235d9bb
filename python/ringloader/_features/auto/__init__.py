"""``num_workers="auto"``: how many workers a loader has, by what is measured."""

from __future__ import annotations

from typing import Any, Literal

from ringloader._features.rules import AUTO, has_remote_pool, is_auto, of_options, option

_AS_AUTO = '"auto"'


class FoundNumber(int):
    """The ``num_workers`` of a loader that finds its number: the number that runs.

    Frameworks make a loader anew from its attributes. A constructor that gets this number finds its own too.
    """

    __slots__ = ()


def auto_of(workers: object) -> Literal["auto"] | None:
    """Returns the option that torch's argument ``num_workers`` stands for, if it stands for one.

    Raises:
        TypeError: If it is another text.
    """
    if isinstance(workers, str) and workers != AUTO:
        raise TypeError(f"num_workers must be an int or {AUTO!r}, not {workers!r}")
    return AUTO if isinstance(workers, (str, FoundNumber)) else None


def _check_auto(name: str, value: Any) -> None:
    """Raises a ``TypeError`` for a number of workers, which each loader has of its own."""
    if value is not None and value != AUTO:
        raise TypeError(f"{name} must be {AUTO!r} here, not {value!r}: pass a number to DataLoader")


NUM_WORKERS = option(None, check=_check_auto, in_worker="is left out", on_torchs="works", is_torchs=True)

RULES = (
    of_options(
        "num_workers",
        'with `seeding="torch"` or `"epoch"`',
        lambda options: is_auto(options) and options.seeding in ("torch", "epoch"),
        f"num_workers={AUTO!r} and seeding={{options.seeding!r}} do not go together: the numbers of a sample "
        "would depend on how many workers there are; leave seeding out",
        _AS_AUTO,
    ),
    of_options(
        "num_workers",
        "with `Workers` on a cluster",
        lambda options: is_auto(options) and has_remote_pool(options),
        f"num_workers={AUTO!r} and worker_pool={{options.worker_pool!r}} do not go together: idle processors "
        "and memory, by which workers are added, are measured on this machine alone; pass a number",
        _AS_AUTO,
    ),
)
