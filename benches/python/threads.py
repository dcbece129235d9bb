"""Threads as workers beside processes, and beside other loaders with threads. Writes build/bench-threads.md.

Takes the arguments of ``python -m benches.python``, of which it sets those that are not given.
"""

from __future__ import annotations

import sys

from . import __main__ as side_by_side
from .files import BUILD

WORKLOADS = ("jpeg", "slow-store", "slow-store-unordered", "tensor-1mb", "tiny-64")
LOADERS = (
    "torch",
    "torch-without-workers",
    "ringloader",
    "ringloader-threads",
    "torchdata-nodes",
    "spdl",
    "dataloader-rs",
)
DEFAULTS = {
    "--only": ",".join(WORKLOADS),
    "--loaders": ",".join(LOADERS),
    "--out": str(BUILD / "bench-threads"),
}


def main() -> int:
    """Runs the main module's ``main``."""
    for option, value in DEFAULTS.items():
        if option not in sys.argv:
            sys.argv += [option, value]
    return side_by_side.main()


if __name__ == "__main__":
    sys.exit(main())
