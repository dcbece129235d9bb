"""A progress bar on the terminal."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(runs: int) -> Iterator[Callable[[str], None]]:
    """Shows how many runs are done, by tqdm if it is there, where standard error is a terminal.

    Args:
        runs: The number of runs.

    Yields:
        A function that is called with the name of each run when it begins.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
    elif importlib.util.find_spec("tqdm") is None:
        sys.stderr.write(f"{runs} runs; with a progress bar: pip install 'ringloader[bench]'\n")
        yield lambda _: None
    else:
        with importlib.import_module("tqdm").tqdm(total=runs, leave=False, unit="run") as bar:

            def begin(name: str) -> None:
                bar.set_description(name)
                bar.update()

            yield begin
