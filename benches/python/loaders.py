"""The loaders that are compared. A further one is one more entry in ``LOADERS``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Taken:
    """Which way the batches of an iterator came, as the loader itself says."""

    path: str
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Loader:
    """How to make a loader, and the paths of which it must take one for its row to be about it."""

    make: Callable[..., Any]
    taken: Callable[[Iterator[Any]], Taken]
    expected_paths: tuple[str, ...]

    def checked(self, iterator: Iterator[Any]) -> Taken:
        """The path taken.

        Raises:
            RuntimeError: it is not an expected one, so a row would be about another loader.
        """
        taken = self.taken(iterator)
        if taken.path not in self.expected_paths:
            expected = " or ".join(self.expected_paths)
            raise RuntimeError(f"took the path {taken.path!r}, not {expected}: {taken.reason}")
        return taken


def _torch(dataset: Dataset[Any], **arguments: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **arguments)


def _torch_taken(iterator: Iterator[Any]) -> Taken:
    """Torch's own: asked of the class, since another package may have replaced what a loader gives."""
    module = type(iterator).__module__
    return Taken("torch" if module.startswith("torch.") else module)


def _ringloader(dataset: Dataset[Any], **arguments: Any) -> Any:
    from ringloader import DataLoader

    return DataLoader(dataset, **arguments)


def _ringloader_taken(iterator: Iterator[Any]) -> Taken:
    import ringloader

    taken = ringloader.path(iterator)
    if taken.path != "torch" and taken.counters["batches"] == 0:
        raise RuntimeError(f"the path is said to be {taken.path!r}, but it carried no batch")
    return Taken(taken.path, taken.reason, dict(taken.counters))


def _rings(dataset: Dataset[Any], **arguments: Any) -> Any:
    """Ringloader's transport under torch's own control, which loaders take that somebody patched."""
    from ringloader import _decide

    _decide.reason_for_rings = lambda _loader: "the benchmark asked for torch's own control"
    return _ringloader(dataset, **arguments)


LOADERS = {
    "torch": Loader(_torch, _torch_taken, ("torch",)),
    # A second entry for the same loader: its ratio to the first is the noise of the machine.
    "torch-again": Loader(_torch, _torch_taken, ("torch",)),
    "ringloader-rings": Loader(_rings, _ringloader_taken, ("rings",)),
    "ringloader": Loader(_ringloader, _ringloader_taken, ("native",)),
}
BASELINE = "torch"
