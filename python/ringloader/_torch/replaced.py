"""Parts of torch that other code has replaced: who did, and which replacements ringloader goes along with."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ringloader._torch import internals

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The module that puts its own functions in the place of two methods of torch's `_BaseDataLoaderIter`. Both do
# what torch's do. For a loader with this attribute, the constructor then passes over first indices.
_SPEECHBRAIN = "speechbrain.dataio.dataloader"
_SKIPS_TO = "_speechbrain_recovery_skip_to"
_KEPT_CONSTRUCTOR = "__old_init__"
_RESETS = {"iter", "_index_sampler", "_sampler_iter", "_num_yielded", "_IterableDataset_len_called"}


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


def is_speechbrains(owner: Any, method: str, found: Any) -> bool:
    """True for a function of speechbrain's that does what torch's does, but for a loader that recovers."""
    if (
        owner is not internals.BaseIterator
        or getattr(found, "__globals__", {}).get("__name__") != _SPEECHBRAIN
    ):
        return False
    if method == "__init__":
        kept = vars(owner).get(_KEPT_CONSTRUCTOR)
        return internals.is_torchs_own(kept, f"{owner.__name__}.__init__") and {
            _KEPT_CONSTRUCTOR,
            _SKIPS_TO,
        } <= set(found.__code__.co_names)
    return method == "_reset" and set(found.__code__.co_names) <= _RESETS


def may_recover() -> bool:
    """True if speechbrain's constructor is in place: epochs may then go on within them."""
    base = internals.BaseIterator
    return is_speechbrains(base, "__init__", vars(base)["__init__"])


def recovers(loader: TorchLoader) -> bool:
    """True if speechbrain has the next epoch of a loader go on within it."""
    return may_recover() and getattr(loader, _SKIPS_TO, None) is not None
