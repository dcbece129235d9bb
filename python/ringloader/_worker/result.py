"""A batch on its way from the place where it is made to the main process, with what options send along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """A batch with a sidecar. A batch that has none travels as it is.

    Every transport carries it as any other named tuple. The stages of the main process take it apart
    (``_core/feature.py``). A user's batch is asked for its type only.

    Attributes:
        data: The batch.
        errors: The bad samples of ``on_error``: pickled if they come from another process, else a list; None
            if all samples were good.
        snapshot: The bytes of a dataset's state (``_features/state/objects.py``); None if none is sent.
        is_empty: True if no sample of the batch is left: the caller gets the next batch.
    """

    data: Any
    errors: Any = None
    snapshot: bytes | None = None
    is_empty: bool = False


def through(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``transform`` for batches that may have a sidecar: it gets the batch alone."""
    return functools.partial(_through, transform)


def _through(transform: Callable[[Any], Any], found: Any) -> Any:
    if type(found) is not Result:
        return transform(found)
    return found if found.is_empty else found._replace(data=transform(found.data))
