"""What ringloader's loader takes beside torch's arguments, and what is wrong with a value."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
CALLED_IN_WORKERS: tuple[str, ...] = ()
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


def callables_of(loader: object) -> list[Any]:
    """The functions among the options of ``loader`` that its workers call."""
    kept = kept_on(loader)
    return [kept[name] for name in CALLED_IN_WORKERS if callable(kept.get(name))]


def theirs(loader: object) -> tuple[str, ...]:
    """The options of a converted loader whose attribute is another thing of its own."""
    found: tuple[str, ...] = getattr(loader, THEIRS, ())
    return found


# Options that say what the constructor is to do, and nothing to an iterator.
_OF_THE_CONSTRUCTOR = ("worker_prefetch",)


def check_prefetch_factor(options: Options, prefetch_factor: object) -> None:
    """Raises a ``ValueError`` where torch's argument says another number."""
    if options.worker_prefetch is not None and prefetch_factor not in (None, options.worker_prefetch):
        raise ValueError(
            f"worker_prefetch={options.worker_prefetch} and prefetch_factor={prefetch_factor!r} differ, and "
            "both are the number of batches that a worker has ready or under way: pass one of them"
        )


def check_with(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with what ``loader`` has of torch's arguments."""
    if options.worker_prefetch is not None and loader.num_workers == 0:
        raise ValueError(
            f"worker_prefetch={options.worker_prefetch} and num_workers=0 do not go together: there is no "
            "worker to have batches ready"
        )
    if not options.main_prefetch:
        return
    if loader.num_workers == 0:
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
                f"{function} cannot take {name}: pass it to DataLoader, or set torch's prefetch_factor there"
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
