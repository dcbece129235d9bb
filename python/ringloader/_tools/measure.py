"""The user's loader as torch's or ringloader's, in a process of its own: its batches, figures and verdict."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringloader._common import proc
from ringloader._core import notes
from ringloader._features.rules import AUTO
from ringloader._features.stats.epoch import Verdict
from ringloader._features.stats.recording import epoch_stats
from ringloader._features.table import options_of
from ringloader._patch.convert import convert
from ringloader._patch.install import uninstall
from ringloader._tools.bench import (
    PROCESS,
    BenchError,
    Configuration,
    Described,
    Figures,
    Measurement,
    Target,
)
from ringloader._torch import internals
from ringloader.dataloader import DataLoader

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Imported by the first iterator of a program, once.
_PRELOADED = [
    "ringloader._core.with_workers",
    "ringloader._core.without_workers",
    "ringloader._features.on_error.collecting",
    "ringloader._features.on_error.handling",
    "ringloader._core.make_transport",
    "ringloader._worker.collate",
]


def run(name: str, *arguments: Any) -> Any:
    """Calls ``described``, ``measure`` or ``verdict``, as :func:`call`."""
    return call(globals()[name], *arguments)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a new process, and ends the process and its workers.

    The process is a copy of one that has only imported torch and ringloader. Loaders start workers there as
    they do in the program. Its output is not shown.

    Raises:
        BenchError: If the function raises, or the process dies.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, *_PRELOADED])
    default = multiprocessing.get_start_method()
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output, ours:
        process = context.Process(target=_serve, args=(theirs, output.name, default, function, arguments))
        try:
            process.start()
            theirs.close()
            connection.wait([ours, process.sentinel])
            # A process that has died leaves an end of file.
            with contextlib.suppress(EOFError):
                result, failure = ours.recv()
                if failure is not None:
                    raise failure
                return result
            process.join()
            code = process.exitcode
            how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
            raise BenchError(f"its process ended with {how}", output.read())
        finally:
            if process.pid is not None:
                process.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()


def _serve(
    channel: connection.Connection,
    output: str,
    start_method: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # A group of its own: the command ends this process with its workers, and no Ctrl-C reaches them.
    os.setpgid(0, 0)
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method(start_method, force=True)
    result: Any = None
    failure = None
    try:
        result = function(*arguments)
    # A program that ends itself, too.
    except (Exception, SystemExit) as error:
        # The text of a worker's error ends with the line that names it.
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        failure = BenchError(line, _traceback(error))
    channel.send((result, failure))
    # Threads of the user's code would be waited for.
    os._exit(0)


# Modules between the command and the user's code.
_NOT_THEIRS = ("ringloader.", "torch.", "importlib", "_frozen_importlib", "inspect")


def _traceback(error: BaseException) -> str:
    """Returns a traceback from the first frame of the user's on; that of a worker is the error's text."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_NOT_THEIRS):
        frames = frames.tb_next
    if frames is not None:
        return "".join(traceback.format_exception(type(error), error, frames))
    return f"{error}\n" if "Traceback" in str(error) else ""


def memory() -> int:
    """Returns the proportional memory (PSS) of this process's group; 0 if the system does not tell."""
    total = 0
    group = [str(os.getpgid(0))]
    for file in Path("/proc").glob("[0-9]*/smaps_rollup"):
        # Others may end meanwhile.
        with contextlib.suppress(OSError):
            if proc.stat_of(int(file.parent.name))[2:3] == group:
                sizes = (line.split() for line in file.read_text().splitlines())
                total += sum(int(size[1]) << 10 for size in sizes if size[0] == "Pss:")
    return total


def make(target: Target, configuration: Configuration, **options: Any) -> Any:
    """Calls the user's function, and returns its loader in a configuration.

    Dataset, sampler, collation and all other arguments stay the user's. All generators have the same seed
    before the user's code runs.

    Args:
        target: The function.
        configuration: The loader that is wanted.
        **options: More options of ringloader's loader.

    Raises:
        TypeError: If the function returns no loader, or ringloader cannot reach its class.
        ValueError: If an option does not go with the loader.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # With one worker: `persistent_workers=True` and others raise without workers.
    number = 1 if configuration.num_workers == AUTO else configuration.num_workers
    loader = target.call(max(number, 1))
    if not isinstance(loader, internals.Loader):
        raise TypeError(f"{target.name} must return a DataLoader, not {type(loader)}")
    # The program may have called `install`.
    uninstall()
    # The same attributes as torch's constructor gives a loader of `num_workers`.
    loader.num_workers = number
    loader.prefetch_factor = (loader.prefetch_factor or 2) if number else None
    loader.timeout = loader.timeout if number else 0
    is_ours = isinstance(loader, DataLoader)
    if configuration.loader == "torch":
        if is_ours:
            # torch's iterator for any class of ours. Its options mean nothing to it.
            object.__setattr__(
                loader, "_get_iterator", functools.partial(internals.Loader._get_iterator, loader)
            )
        return loader
    if configuration.num_workers == AUTO:
        options["num_workers"] = AUTO
    elif is_ours and (own := options_of(loader)).num_workers == AUTO:
        options |= {"num_workers": None, "seeding": own.seeds}
    if is_ours or configuration.worker_method != PROCESS:
        options["worker_method"] = configuration.worker_method
    if configuration.worker_concurrency is not None:
        options["worker_concurrency"] = configuration.worker_concurrency
    return convert(loader, **options)


def measure(target: Target, configuration: Configuration, seconds: float, step: float) -> Measurement:
    """Takes batches for ``seconds`` after the first one, over as many epochs as that takes.

    The start of further epochs counts, as it does in training.

    Args:
        target: The user's function.
        configuration: The loader that is wanted.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.
    """
    loader = make(target, configuration)
    batches = _epochs(loader)
    start = time.perf_counter()
    batch = next(batches)
    first = last = time.perf_counter()
    cpu = time.process_time()
    count, slept = 0, 0.0
    while last < first + seconds:
        if step:
            before = time.perf_counter()
            time.sleep(step)
            slept += time.perf_counter() - before
        # One batch is held, as by a training loop.
        batch = next(batches, batches)
        if batch is batches:
            break
        count += 1
        last = time.perf_counter()
    cpu = time.process_time() - cpu
    used = memory()
    taken = notes.of(loader)
    batches.close()
    # Ends persistent workers.
    loader._iterator = None
    figures = Figures(
        # One batch is all there is of a source that is read once.
        batches_per_second=count / (last - first) if count else 1 / (first - start),
        first_batch_seconds=first - start,
        main_cpu_us=1e6 * cpu / max(count, 1),
        memory_mb=used / 1e6,
        step=slept / max(count, 1),
    )
    torchs = taken.reason if taken is not None and taken.path == "torch" else None
    return Measurement(figures, loader.num_workers, torchs)


def _epochs(loader: TorchLoader) -> Generator[Any]:
    """Yields the batches of one epoch after the other, until one has none: its source is read only once."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


def verdict(target: Target, configuration: Configuration, seconds: float, step: float) -> Verdict:
    """Returns what limits an epoch of the loader.

    A long epoch ends early, ``seconds`` after the first batch, but not before its start is a small part of
    it. Of short ones the last counts, which persistent workers did not start for.

    Args:
        target: The user's function.
        configuration: A loader of ringloader's.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.
    """
    loader = make(target, configuration, stats=True)
    found: Verdict | None = None
    start, end = time.perf_counter(), math.inf
    while found is None or time.perf_counter() < end:
        has_batches = False
        for _ in loader:
            has_batches = True
            if end == math.inf:
                first = time.perf_counter()
                end = first + max(seconds, 3 * (first - start))
            time.sleep(step)
            if found is None and time.perf_counter() >= end:
                break
        if not has_batches:
            break
        found = epoch_stats(loader).verdict
    assert found is not None, "loaders without batches are told when batches are compared"
    return found


_MOST = 20
# After the first batch.
_SECONDS = 5.0


def described(target: Target, configuration: Configuration) -> list[Described]:
    """Returns the first 20 batches, or those of an epoch that is shorter.

    Of a slow loader it returns those of five seconds. An epoch's end is a batch without parts.

    Raises:
        ValueError: If the loader has no batches.
    """
    loader = make(target, configuration)
    found: list[Described] = []
    until = math.inf
    for batch in itertools.islice(loader, _MOST):
        until = min(until, time.perf_counter() + _SECONDS)
        found.append(_parts(batch))
        if time.perf_counter() > until:
            return found
    if not found:
        raise ValueError(f"{target.name} returns a loader without batches")
    return found if len(found) == _MOST else [*found, []]


def _parts(batch: Any) -> Described:
    """Returns the structure of a batch, and its leaves."""
    leaves, structure = internals.tree_flatten_with_path(batch)
    text = " ".join(str(structure).split())
    return [("", text, text), *((place, _digest(leaf), _text(leaf)) for place, leaf in leaves)]


def _text(leaf: Any) -> str:
    about = f"{leaf.dtype} {tuple(leaf.shape)} " if isinstance(leaf, (torch.Tensor, np.ndarray)) else ""
    return f"{type(leaf).__qualname__} {about}{' '.join(repr(leaf).split()):.100}"


def _digest(leaf: Any) -> str:
    """Returns a digest of a leaf's pickle. An object that has none is compared by its class."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    # Without a memo: the transport decides which objects are one object.
    pickler.fast = True
    try:
        pickler.dump(leaf)
    except Exception:
        return type(leaf).__qualname__
    return hashlib.blake2b(file.getbuffer()).hexdigest()


class _Pickler(pickle.Pickler):
    """Pickles tensors and arrays by their elements: how memory holds them depends on the transport."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            try:
                flat = value.detach().cpu().resolve_conj().reshape(-1)
                return repr, ((value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes()),)
            except RuntimeError:
                # Sparse ones and others without plain elements.
                return repr, (f"{value.dtype} {value}",)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return repr, ((value.dtype, value.shape, value.tobytes()),)
        return NotImplemented
