"""What ringloader's loader takes beside torch's arguments, and what is wrong with a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of :class:`ringloader.DataLoader`, checked.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For one that is out of range.
    """

    max_shared_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_shared_bytes is not None:
            if not isinstance(self.max_shared_bytes, int) or isinstance(self.max_shared_bytes, bool):
                raise TypeError(f"max_shared_bytes must be an int or None, not {self.max_shared_bytes!r}")
            if self.max_shared_bytes <= 0:
                raise ValueError(f"max_shared_bytes must be positive, not {self.max_shared_bytes}")

    @classmethod
    def of(cls, loader: object) -> Options:
        """As they stand on ``loader`` now."""
        return cls(**{name: getattr(loader, name) for name in NAMES if hasattr(loader, name)})


NAMES = tuple(field.name for field in dataclasses.fields(Options))


def checked(function: str, given: Mapping[str, Any]) -> Options:
    """``given`` to ``function`` as options.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{function} got an unknown option {name!r}; there are: {', '.join(NAMES)}")
    return Options(**given)
