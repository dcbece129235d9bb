"""Every torch loader of the process over ringloader, through the hook at ``DataLoader._get_iterator``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ringloader._options as _options
from ringloader._torch import hook


def install(**options: Any) -> None:
    """Has every ``torch.utils.data.DataLoader`` of this process iterate over ringloader.

    Also those that libraries build, and subclasses: whatever comes to torch's own ``_get_iterator``. A class
    whose ``_get_iterator`` does not call torch's (torchdata's ``StatefulDataLoader``) is left alone.
    Iterators that exist go on as they are. :func:`ringloader.report` tells which path a loader took, and why.

    Forked children inherit it; spawned ones do not, unless their environment says so (see ``docs/without-changing-code.md``).
    Installed twice, the options of the second time replace those of the first. Where somebody else replaces
    ``DataLoader._get_iterator``, that takes effect: a replacement that was there before keeps loaders on
    torch's path; one that comes later gets ringloader's iterators from what it replaced.

    Args:
        **options: The keyword-only arguments of :class:`ringloader.DataLoader`, for loaders of any other
            class. Those that are not given have their defaults.

    Raises:
        TypeError: For an unknown option, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    _put(_maker(_options.checked("install()", options)))


def uninstall() -> None:
    """Takes back :func:`install`: loaders that are not ringloader's own iterate as before.

    At any time and in any order, also when somebody has wrapped ``DataLoader._get_iterator`` since. Iterators
    that exist go on. Does nothing when nothing is installed.
    """
    _put(None)


def installed(**options: Any) -> contextlib.AbstractContextManager[None]:
    """:func:`install` for a ``with`` block, after which all is as it was before, the options too.

    It is the process that is changed, not the thread.

    Args:
        **options: As :func:`install`, checked at once.

    Raises:
        TypeError: For an unknown option, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    return _installed(_maker(_options.checked("installed()", options)))


@contextlib.contextmanager
def _installed(make: hook.Make) -> Iterator[None]:
    before = hook.current()
    _put(make)
    try:
        yield
    finally:
        _put(before)


def _put(make: hook.Make | None) -> None:
    # What cannot be imported is said now, and not at the first epoch.
    from ringloader._torch import internals

    hook.put(internals.Loader, make)


def _maker(options: _options.Options) -> hook.Make:
    return functools.partial(make_iterator, options)


def make_iterator(options: _options.Options, loader: Any, previous: Callable[[Any], Any]) -> Any:
    """The iterator of any torch loader; ``previous`` makes it without ringloader."""
    import ringloader.dataloader as dataloader

    if isinstance(loader, dataloader.DataLoader):
        # It has decided already, and asks for what there is without ringloader.
        return previous(loader)
    return dataloader.get_iterator(loader, options, previous, lambda: previous(loader))
