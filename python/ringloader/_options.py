"""What ringloader's loader takes beside torch's arguments, and what is wrong with a value."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ringloader.bad_samples as bad_samples

if TYPE_CHECKING:
    import torch

    from ringloader.seeds import Seeds


# The values of `worker_method`, in torch's words.
THREAD = "thread"
_METHODS = ("multiprocessing", THREAD)


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, checked as far as no torch is needed.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    max_shared_bytes: int | None = None
    device: torch.device | str | int | None = None
    device_prefetch: int = 2
    device_transform: Callable[[Any], Any] | None = None
    # A `ringloader.WorkerPool`: its module needs torch.
    worker_pool: Any = None
    worker_prefetch: int | None = None
    main_prefetch: int = 0
    worker_method: str = "multiprocessing"
    last_batch: str | None = None
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = None
    reseed_workers: bool = False
    seed: int | None = None
    restart_workers: int = 0
    on_error: bad_samples.OnError = bad_samples.RAISE
    max_errors: int | None = None
    watchdog: float | None = None

    def __post_init__(self) -> None:
        if self.max_shared_bytes is not None:
            if not _is_int(self.max_shared_bytes):
                raise TypeError(f"max_shared_bytes must be an int or None, not {self.max_shared_bytes!r}")
            if self.max_shared_bytes <= 0:
                raise ValueError(f"max_shared_bytes must be positive, not {self.max_shared_bytes}")
        self._check_device()
        if not _is_int(self.device_prefetch):
            raise TypeError(f"device_prefetch must be an int, not {self.device_prefetch!r}")
        if self.device_prefetch < 0:
            raise ValueError(f"device_prefetch must be 0 or more, not {self.device_prefetch}")
        if isinstance(self.device_transform, str):
            raise TypeError(
                "device_transform must be a callable, which no text can name, not "
                f"{self.device_transform!r}: pass the function itself to DataLoader, install() or convert()"
            )
        if self.device_transform is not None and not callable(self.device_transform):
            raise TypeError(f"device_transform must be a callable or None, not {self.device_transform!r}")
        if self.device_transform is not None and self.device is None:
            raise ValueError("device_transform needs device: pass the device that its batches are to be on")
        self._check_worker_pool()
        self._check_prefetch()
        self._check_worker_method()
        if self.last_batch not in (None, "keep", "discard", "rollover"):
            raise ValueError(
                f"last_batch must be 'keep', 'discard', 'rollover' or None, not {self.last_batch!r}"
            )
        self._check_epochs()
        self._check_restarts()
        bad_samples.check(self.on_error, self.max_errors)
        self._check_watchdog()

    def _check_restarts(self) -> None:
        if not _is_int(self.restart_workers):
            raise TypeError(f"restart_workers must be an int, not {self.restart_workers!r}")
        if self.restart_workers < 0:
            raise ValueError(f"restart_workers must be 0 or more, not {self.restart_workers}")
        if self.restart_workers and self.worker_method == THREAD:
            raise ValueError(
                f"restart_workers={self.restart_workers} and worker_method={THREAD!r} do not go together: a "
                "thread is lost only with the process; leave one of them out"
            )

    def _check_watchdog(self) -> None:
        seconds = self.watchdog
        if seconds is None:
            return
        if not isinstance(seconds, float) and not _is_int(seconds):
            raise TypeError(f"watchdog must be a number of seconds or None, not {seconds!r}")
        if not seconds > 0:
            raise ValueError(f"watchdog must be positive, not {seconds}: leave it out to have none")

    def _check_prefetch(self) -> None:
        if self.worker_prefetch is not None:
            if not _is_int(self.worker_prefetch):
                raise TypeError(f"worker_prefetch must be an int or None, not {self.worker_prefetch!r}")
            if self.worker_prefetch <= 0:
                raise ValueError(f"worker_prefetch must be positive, not {self.worker_prefetch}")
        if not _is_int(self.main_prefetch):
            raise TypeError(f"main_prefetch must be an int, not {self.main_prefetch!r}")
        if self.main_prefetch < 0:
            raise ValueError(f"main_prefetch must be 0 or more, not {self.main_prefetch}")
        if self.main_prefetch and self.device is not None:
            raise ValueError(
                f"main_prefetch={self.main_prefetch} and device={self.device!r} do not go together: batches "
                "for a device are prepared before their turn in any case; say with device_prefetch how many"
            )

    def _check_worker_pool(self) -> None:
        pool = self.worker_pool
        if isinstance(pool, str):
            raise TypeError(
                f"worker_pool must be a ringloader.WorkerPool, which no text can name, not {pool!r}: pass "
                "the pool itself to DataLoader, install() or convert()"
            )
        if pool is not None and getattr(type(pool), "_is_worker_pool", None) is not True:
            raise TypeError(f"worker_pool must be a ringloader.WorkerPool or None, not {pool!r}")

    def _check_worker_method(self) -> None:
        if not isinstance(self.worker_method, str):
            raise TypeError(f"worker_method must be one of {_METHODS}, not {self.worker_method!r}")
        if self.worker_method not in _METHODS:
            raise ValueError(f"worker_method must be one of {_METHODS}, not {self.worker_method!r}")
        if self.worker_method == THREAD and self.max_shared_bytes is not None:
            raise ValueError(
                f"worker_method={THREAD!r} and max_shared_bytes={self.max_shared_bytes} do not go together: "
                "threads need no shared memory; leave one of them out"
            )
        if self.worker_method == THREAD and self.main_prefetch:
            raise ValueError(
                f"worker_method={THREAD!r} and main_prefetch={self.main_prefetch} do not go together: what "
                "threads make needs no decoding; leave one of them out"
            )
        if self.worker_method == THREAD and self.worker_pool is not None:
            raise ValueError(
                f"worker_method={THREAD!r} and worker_pool={self.worker_pool!r} do not go together: a pool "
                "has processes; leave one of them out"
            )

    def _check_epochs(self) -> None:
        if isinstance(self.worker_reset_fn, str):
            raise TypeError(
                "worker_reset_fn must be a callable, which no text can name, not "
                f"{self.worker_reset_fn!r}: pass the function itself to DataLoader, install() or convert()"
            )
        if self.worker_reset_fn is not None and not callable(self.worker_reset_fn):
            raise TypeError(f"worker_reset_fn must be a callable or None, not {self.worker_reset_fn!r}")
        if not isinstance(self.reseed_workers, bool):
            raise TypeError(f"reseed_workers must be a bool, not {self.reseed_workers!r}")
        if self.seed is None:
            return
        if not _is_int(self.seed):
            raise TypeError(f"seed must be an int or None, not {self.seed!r}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be from 0 up to and without {1 << 64}, not {self.seed}")
        if self.worker_reset_fn is None and not self.reseed_workers:
            raise ValueError(
                f"seed={self.seed} has no effect without worker_reset_fn or reseed_workers=True: for the "
                "order of the samples, pass torch's generator"
            )

    def _check_device(self) -> None:
        device = self.device
        if device is None or isinstance(device, str) or _is_device(device):
            return
        if not isinstance(device, int) or isinstance(device, bool):
            raise TypeError(
                "device must be a torch.device, a string ('cuda:0', or 'auto'), an index or None, "
                f"not {device!r}"
            )
        if device < 0:
            raise ValueError(f"device must be an index of 0 or more, not {device}")

    @classmethod
    def of(cls, loader: object) -> Options:
        """As they stand on ``loader`` now."""
        return cls(**kept_on(loader))


# Of all options.
NAMES = tuple(field.name for field in dataclasses.fields(Options))
# Of those that are functions, the ones that workers call: the processes of a pool hold them.
CALLED_IN_WORKERS = ("worker_reset_fn", "on_error")
# The attribute of a converted loader that names its own attributes which have an option's name.
THEIRS = "_ringloader_theirs"


def attribute(name: str) -> str:
    """The attribute of a loader that has an option.

    Private where a subclass is likely to have one of that name: ``device`` is the name of many.
    """
    return name if name == "max_shared_bytes" else f"_ringloader_{name}"


def kept_on(loader: object) -> dict[str, Any]:
    """The options that ``loader`` has, by their names."""
    ours = (name for name in NAMES if name not in theirs(loader) and hasattr(loader, attribute(name)))
    return {name: getattr(loader, attribute(name)) for name in ours}


def put_on(loader: object, options: Options) -> None:
    """Sets all options on ``loader``, but for those whose attribute is its own."""
    for name in NAMES:
        if name not in theirs(loader):
            setattr(loader, attribute(name), getattr(options, name))


def put_attributes(loader: object, options: Options, before: Options | None = None) -> None:
    """Sets an attribute with the name of each option, where code looks that makes such a loader anew.

    Lightning reads the constructor's arguments from there. An attribute that a subclass or the program has
    set stays.

    Args:
        loader: The loader.
        options: The options that it has from now on.
        before: The options that it had, whose attributes are replaced.
    """
    own = vars(loader)
    for name in NAMES:
        if name in theirs(loader):
            continue
        is_ours = before is not None and name in own and own[name] is getattr(before, name)
        if is_ours or not hasattr(loader, name):
            setattr(loader, name, getattr(options, name))


def callables_of(loader: object) -> list[Any]:
    """The functions among the options of ``loader`` that its workers call."""
    kept = kept_on(loader)
    return [kept[name] for name in CALLED_IN_WORKERS if callable(kept.get(name))]


def theirs(loader: object) -> tuple[str, ...]:
    """The options of a converted loader whose attribute is another thing of its own."""
    found: tuple[str, ...] = getattr(loader, THEIRS, ())
    return found


# Options that say what the constructor is to do, and nothing to an iterator.
_OF_THE_CONSTRUCTOR = {
    "worker_prefetch": "set torch's prefetch_factor there",
    "last_batch": "give the loader a ringloader.RolloverBatchSampler",
}


# The options that a loader can have after its constructor.
CONVERTIBLE = tuple(name for name in NAMES if name not in _OF_THE_CONSTRUCTOR)


def check_prefetch_factor(options: Options, prefetch_factor: object) -> None:
    """Raises a ``ValueError`` where torch's argument says another number."""
    if options.worker_prefetch is not None and prefetch_factor not in (None, options.worker_prefetch):
        raise ValueError(
            f"worker_prefetch={options.worker_prefetch} and prefetch_factor={prefetch_factor!r} differ, and "
            "both are the number of batches that a worker has ready or under way: pass one of them"
        )


def check_with(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with what ``loader`` has of torch's arguments."""
    # With a pool, none said are as many as it has.
    has_workers = loader.num_workers > 0 or options.worker_pool is not None
    if options.worker_prefetch is not None and not has_workers:
        raise ValueError(
            f"worker_prefetch={options.worker_prefetch} and num_workers=0 do not go together: there is no "
            "worker to have batches ready"
        )
    if not options.main_prefetch:
        return
    if not has_workers:
        raise ValueError(
            f"main_prefetch={options.main_prefetch} and num_workers=0 do not go together: without workers "
            "nothing is there to be decoded; use num_workers=1"
        )
    if loader.pin_memory:
        raise ValueError(
            f"main_prefetch={options.main_prefetch} and pin_memory=True do not go together: batches are "
            "pinned before their turn in any case; leave main_prefetch out"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_device(value: object) -> bool:
    """Whether it is a ``torch.device``, without importing torch."""
    return (type(value).__module__, type(value).__qualname__) == ("torch", "device")


def checked(function: str, given: Mapping[str, Any]) -> Options:
    """``given`` to ``function`` as options.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    check_names(function, given)
    return Options(**given)


def check_names(function: str, given: Iterable[str]) -> None:
    """Raises a ``TypeError`` for a name of ``given`` to ``function`` that is no option's."""
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{function} got an unknown option {name!r}; there are: {', '.join(NAMES)}")
        if name in _OF_THE_CONSTRUCTOR:
            raise TypeError(
                f"{function} cannot take {name}: pass it to DataLoader, or {_OF_THE_CONSTRUCTOR[name]}"
            )


def from_text(text: str) -> Options:
    """Options as an environment variable or a command line names them.

    Args:
        text: ``1`` for the defaults, or ``name=value`` with commas between.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range, or a text that says nothing.
    """
    given = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected 1, or name=value with commas between, not {text!r}")
        given[name.strip()] = value_of(value)
    return checked(repr(text), given)


def to_text(options: Options) -> str:
    """What :func:`from_text` makes ``options`` of."""
    set_ones = [
        f"{name}={getattr(options, name)}"
        for name in NAMES
        if getattr(options, name) != getattr(Options, name)
    ]
    return ",".join(set_ones) or "1"


def value_of(text: str) -> object:
    """A number, None or a truth value where ``text`` spells one, else ``text``."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text
