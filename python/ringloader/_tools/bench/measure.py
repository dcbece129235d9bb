"""The user's loader as torch's or ringloader's: its first batches as text, its rate and its verdict."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import numbers
import random
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringloader._core import notes
from ringloader._features.rules import AUTO
from ringloader._features.stats.recording import epoch_stats
from ringloader._features.table import options_of
from ringloader._patch.convert import convert
from ringloader._patch.install import uninstall
from ringloader._tools.bench import child
from ringloader._tools.bench.arguments import PROCESS, Configuration, Target, TargetError
from ringloader._torch import hook, internals
from ringloader.dataloader import DataLoader

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_END = object()


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run of a loader.

    Attributes:
        batches_per_second: The rate after the first batch.
        first_batch_seconds: From ``iter`` to the first batch.
        main_cpu_us: The processor time of the main process for a batch, with all its threads.
        memory_mb: The memory of the process and its workers, or None where the system does not tell.
        step: The seconds that a training step took; 0 without one.
        path: The path of ringloader's batches.
        reason: The reason for it.
        num_workers: The number of workers in the end.
    """

    batches_per_second: float
    first_batch_seconds: float
    main_cpu_us: float
    memory_mb: float | None
    step: float
    path: str | None
    reason: str | None
    num_workers: int


def make(target: Target, configuration: Configuration, **options: Any) -> Any:
    """Calls the user's function, and returns its loader in a configuration.

    Dataset, sampler, collation and all other arguments stay the user's. All generators have the same seed
    before the user's code runs.

    Args:
        target: The function.
        configuration: The loader that is wanted.
        **options: More options of ringloader's loader.

    Raises:
        TargetError: If the function gives no loader.
        TypeError: If ringloader cannot reach its class.
        ValueError: If an option does not go with the loader.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # With one worker: `persistent_workers=True` and others raise without workers.
    number = 1 if configuration.is_auto else configuration.number
    loader = target.call(max(number, 1))
    if not isinstance(loader, internals.Loader):
        raise TargetError(f"{target} must return a DataLoader, not {type(loader)}")
    # The program may have called it.
    uninstall()
    _set_workers(loader, number)
    is_ours = isinstance(loader, DataLoader)
    if configuration.loader == "torch":
        if is_ours:
            # torch's iterator for any class of ours. Its options mean nothing to it.
            get_iterator = hook.beneath(internals.Loader._get_iterator)
            object.__setattr__(loader, "_get_iterator", functools.partial(get_iterator, loader))
        return loader
    if configuration.is_auto:
        options["num_workers"] = AUTO
    elif is_ours and (own := options_of(loader)).num_workers == AUTO:
        options |= {"num_workers": None, "seeding": own.seeds}
    if is_ours or configuration.worker_method != PROCESS:
        options["worker_method"] = configuration.worker_method
    if configuration.worker_concurrency is not None:
        options["worker_concurrency"] = configuration.worker_concurrency
    return convert(loader, **options)


def _set_workers(loader: TorchLoader, number: int) -> None:
    """Sets what torch's constructor makes of ``num_workers``."""
    loader.num_workers = number
    if number:
        loader.prefetch_factor = loader.prefetch_factor or 2
    else:
        loader.prefetch_factor = None
        loader.timeout = 0


def measure(target: Target, configuration: Configuration, seconds: float, step: float) -> Measurement:
    """Takes batches for ``seconds`` after the first one, over as many epochs as that takes.

    The start of further epochs counts, as it does in training.

    Args:
        target: The user's function.
        configuration: The loader that is wanted.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.

    Raises:
        TargetError: If the function gives no loader, or one without batches.
    """
    loader = make(target, configuration)
    batches = _epochs(loader)
    start = time.perf_counter()
    batch = next(batches, _END)
    if batch is _END:
        raise TargetError(f"{target} returns a loader without batches")
    first = last = time.perf_counter()
    cpu = time.process_time()
    count, slept = 0, 0.0
    while last < first + seconds:
        if step:
            before = time.perf_counter()
            time.sleep(step)
            slept += time.perf_counter() - before
        # One batch is held, as by a training loop.
        batch = next(batches, _END)
        if batch is _END:
            break
        count += 1
        last = time.perf_counter()
    cpu = time.process_time() - cpu
    used = child.memory_of_tree()
    taken = notes.of(loader)
    batches.close()
    # Ends persistent workers.
    loader._iterator = None
    return Measurement(
        # One batch is all there is of a source that is read once.
        batches_per_second=count / (last - first) if count else 1 / (first - start),
        first_batch_seconds=first - start,
        main_cpu_us=1e6 * cpu / max(count, 1),
        memory_mb=None if used is None else used / 1e6,
        step=slept / max(count, 1),
        path=None if taken is None else taken.path,
        reason=None if taken is None else taken.reason,
        num_workers=loader.num_workers,
    )


def verdict(target: Target, configuration: Configuration, seconds: float, step: float) -> dict[str, Any]:
    """Returns what limits an epoch of the loader, as a dict.

    A long epoch ends early, ``seconds`` after the first batch, but not before its start is a small part of
    it. Of short ones the last counts, which persistent workers did not start for.

    Args:
        target: The user's function.
        configuration: A loader of ringloader's.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.

    Raises:
        TargetError: If the function gives no loader, or one without batches.
    """
    loader = make(target, configuration, stats=True)
    found = None
    start, end = time.perf_counter(), math.inf
    while found is None or time.perf_counter() < end:
        has_batches = False
        for _ in loader:
            has_batches = True
            if end == math.inf:
                first = time.perf_counter()
                end = first + max(seconds, 3 * (first - start))
            if step:
                time.sleep(step)
            if found is None and time.perf_counter() >= end:
                break
        if not has_batches:
            break
        found = epoch_stats(loader).verdict
    if found is None:
        raise TargetError(f"{target} returns a loader without batches")
    return dataclasses.asdict(found)


def _epochs(loader: TorchLoader) -> Generator[Any]:
    """Yields the batches of one epoch after the other, until one has none: its source is read only once."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


# A batch: the place of each part, and the part.
Described = list[tuple[str, str]]

_MOST = 20
# After the first batch.
_SECONDS = 5.0
# Elements of a tensor that are written out.
_FEW = 8


def described(target: Target, configuration: Configuration) -> list[Described]:
    """Returns the first 20 batches, or those of an epoch that is shorter.

    Of a slow loader it returns those of five seconds. An epoch's end is a batch without parts.
    """
    loader = make(target, configuration)
    found: list[Described] = []
    for batch in itertools.islice(loader, _MOST):
        if not found:
            until = time.perf_counter() + _SECONDS
        found.append(list(_parts(batch, "")))
        if time.perf_counter() > until:
            return found
    return found if len(found) == _MOST else [*found, []]


def difference(first: list[Described], second: list[Described]) -> tuple[str, str, str] | None:
    """Returns where two loaders' batches differ for the first time, with what each has there, or None."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        for here, there in itertools.zip_longest(one, other, fillvalue=("", "nothing")):
            if here != there:
                place = here[0] if here[0] == there[0] else ""
                return f"batch {number}{place}", here[1], there[1]
    return None


def _parts(value: Any, place: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields the parts of a value. ``above`` are the objects that it is a part of, by identity."""
    name = type(value).__qualname__
    if id(value) in above:
        yield place, f"the {name} that it is a part of"
        return
    above = (*above, id(value))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            yield place, f"{name} {value.dtype} {tuple(value.shape)}"
            yield from _parts(value.tolist(), place, above)
        else:
            yield place, f"{name} {value.dtype} {tuple(value.shape)} {_elements(value)}"
    elif isinstance(value, Mapping):
        yield place, f"{name} [{', '.join(map(_key, value))}]"
        for key, item in value.items():
            yield from _parts(item, f"{place}[{_key(key)}]", above)
    elif isinstance(value, (list, tuple)):
        yield place, f"{name} of {len(value)}"
        for number, item in enumerate(value):
            yield from _parts(item, f"{place}[{number}]", above)
    elif value is None or isinstance(value, (str, bytes, numbers.Number, np.generic)):
        yield place, f"{name} {value!r}"
    elif isinstance(value, (set, frozenset)):
        yield place, f"{name} {sorted(map(_key, value))}"
    elif callable(value):
        # A class or a function: its attributes lead anywhere.
        yield place, getattr(value, "__qualname__", name)
    else:
        yield place, _text(value)
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        own = {field.name: getattr(value, field.name, None) for field in fields}
        own |= getattr(value, "__dict__", {})
        for attribute, item in own.items():
            yield from _parts(item, f"{place}.{attribute}", above)


def _text(value: Any) -> str:
    """Returns the class of an object with its text, unless it has the object's address or raises."""
    name = type(value).__qualname__
    try:
        text = repr(value)
    except Exception:
        return name
    return name if " at 0x" in text else f"{name} {text:.200}"


def _key(key: Any) -> str:
    """Returns the text of a dict's key, or of an element of a set."""
    return repr(key) if isinstance(key, (str, numbers.Number)) else _text(key)


def _elements(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "on meta"
        value = value.detach()
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return str(value)
        if value.numel() > _FEW:
            flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return _digest(flat.view(torch.uint8).numpy())
    elif value.size > _FEW:
        return _digest(value.tobytes())
    return str(value.tolist())


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
