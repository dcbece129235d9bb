"""Parts of torch that other code has replaced: who did, and which replacements ringloader goes along with."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Functions that do what torch's do, in the place of torch's: the part, and the module that puts it there.
_KNOWN = {
    ("_BaseDataLoaderIter.__init__", "speechbrain.dataio.dataloader"),
    ("_BaseDataLoaderIter._reset", "speechbrain.dataio.dataloader"),
}
# A loader with this attribute goes on within its next epoch: speechbrain's constructor passes over indices.
_SKIPS_TO = "_speechbrain_recovery_skip_to"


class Replaced(NamedTuple):
    """A replaced part of torch.

    Attributes:
        name: The part.
        by: The module that has its own in the place, if that is known.
    """

    name: str
    by: str | None

    def __str__(self) -> str:
        return f"{self.name} was replaced by {self.by}" if self.by else f"{self.name} was replaced"


def replaced(name: str, found: Any) -> Replaced:
    """Returns a replaced part with the module of what was found in its place."""
    while isinstance(found, functools.partial):
        found = found.func
    found = getattr(found, "__func__", found)
    # Of a function, not its `__module__`, which functools.wraps copies.
    module = getattr(found, "__globals__", {}).get("__name__")
    if module is None:
        module = (found if isinstance(found, type) else type(found)).__module__
    is_named = isinstance(module, str) and module != "builtins" and module.partition(".")[0] != "torch"
    return Replaced(name, module if is_named else None)


def is_known(name: str, found: Any) -> bool:
    """True for a function of the table above."""
    return (name, getattr(found, "__globals__", {}).get("__name__")) in _KNOWN


def recovers(loader: TorchLoader) -> bool:
    """True if speechbrain has the next epoch of a loader go on within it."""
    return vars(loader).get(_SKIPS_TO) is not None
