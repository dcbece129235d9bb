"""Every torch loader of the process over ringloader, through the hook at ``DataLoader._get_iterator``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from ringloader._features import rules
from ringloader._features.report import at_exit
from ringloader._features.table import Options, options_of
from ringloader._patch import by_name
from ringloader._patch import stateful as stateful_class
from ringloader._patch.given import GivenOptions
from ringloader._torch import hook

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def install(*, stateful: bool = False, **options: Unpack[GivenOptions]) -> None:
    """Makes every ``torch.utils.data.DataLoader`` of this process use ringloader.

    This includes subclasses, and loaders that libraries create: all that use torch's own ``_get_iterator``.
    A class whose ``_get_iterator`` does not call torch's, such as torchdata's ``StatefulDataLoader``, is left
    alone, unless ``stateful`` replaces it. Existing iterators do not change. ``ringloader.report`` says
    which path a loader took, and why.

    An option is left aside for a loader that it does not go with, and ``ringloader.report`` says so:

    - ``worker_pool`` with ``multiprocessing_context`` or a ``Dispatch``, or with ``persistent_workers``,
      unless with ``prefetch_epochs``;
    - ``main_prefetch`` with ``pin_memory``, or without workers;
    - ``worker_method="thread"`` with ``multiprocessing_context``, a DataPipe or a ``Dispatch``;
    - ``worker_task="sample"`` with an ``IterableDataset`` or a dataset that has a ``state_dict``;
    - ``worker_concurrency`` with an ``IterableDataset`` or a dataset that has a ``state_dict``;
    - ``worker_reset_fn`` with a ``Dispatch``;
    - ``restart_workers`` with a ``Dispatch``;
    - ``on_error`` with a ``Dispatch``;
    - ``on_error="retry"`` with an ``IterableDataset``;
    - ``sample_timeout`` with a ``Dispatch`` or an ``IterableDataset``;
    - ``prefetch_epochs`` with an ``IterableDataset``, a dataset that has a ``state_dict`` or threads over a
      dataset that has ``set_epoch``, or without ``persistent_workers`` or ``worker_pool``.

    Loaders in worker processes, which datasets may have, are without ``device``, ``device_transform`` and
    ``num_workers``: the main process moves what the worker sends. They are without ``worker_reset_fn``,
    ``seeding`` and ``seed`` too, which are for loaders of the main process.

    Forked children inherit it. Children that start a Python of their own do not, unless their environment
    says so (see ``docs/without-changing-code.md``). A second call replaces the options of the first.

    If other code replaces ``DataLoader._get_iterator``, the replacement takes effect: one that was there
    before keeps loaders on torch's path; one that comes later gets ringloader's iterators from the method
    that it replaced.

    Args:
        stateful: True to put ``ringloader.StatefulDataLoader`` in the place of torchdata's class:
            all modules that have torchdata's class by a name get ringloader's by that name, now and when
            they import it later. Objects and subclasses that exist stay torchdata's, and a warning of the
            logger ``ringloader`` names the subclasses. ``**options`` do not reach the class. torch's class
            gets no new method.
        **options: The keyword-only arguments of ``ringloader.DataLoader``, for loaders of any other class.
            Options that are not given have their defaults.

    Raises:
        TypeError: If an option is unknown, or has the wrong type.
        ValueError: If a value is out of range, or its device does not exist.
        ModuleNotFoundError: For ``stateful=True`` without torchdata.
        RuntimeError: For ``stateful=True`` on other systems than Linux.
    """
    _put(_wanted("install()", stateful, options))


def uninstall() -> None:
    """Undoes ``ringloader.install``: loaders that are not ringloader's own iterate as before.

    A loader that was made of ringloader's class in the place of torchdata's stays one.

    Works at any time, also after other code has wrapped ``DataLoader._get_iterator``. Existing iterators
    continue. Without an ``install`` it does nothing.
    """
    _put(_Wanted(None, stateful=False))


def installed(
    *, stateful: bool = False, **options: Unpack[GivenOptions]
) -> contextlib.AbstractContextManager[None]:
    """Calls ``ringloader.install`` for a ``with`` block, and restores the former state and options after it.

    The change is for the process, not only for the thread.

    Args:
        stateful: As ``ringloader.install`` takes it.
        **options: As ``ringloader.install`` takes them, checked at once.

    Raises:
        TypeError: If an option is unknown, or has the wrong type.
        ValueError: If a value is out of range, or its device does not exist.
        ModuleNotFoundError: For ``stateful=True`` without torchdata.
        RuntimeError: For ``stateful=True`` on other systems than Linux.
    """
    return _installed(_wanted("installed()", stateful, options))


class _Wanted(NamedTuple):
    """The state of an installation."""

    # Makes the iterators of other classes; None: nothing is installed.
    make: hook.Make | None
    # True: ringloader's class is in the place of torchdata's.
    stateful: bool


@contextlib.contextmanager
def _installed(wanted: _Wanted) -> Iterator[None]:
    before = _Wanted(hook.current(), stateful_class.is_put())
    _put(wanted)
    try:
        yield
    finally:
        _put(before)


def _put(wanted: _Wanted) -> None:
    # Raises for a module that cannot be imported now, and not at the first epoch.
    from ringloader._torch import internals

    at_exit.begin()
    stateful_class.put(wanted.stateful)
    hook.put(internals.Loader, wanted.make)


def _wanted(function: str, stateful: bool, given: GivenOptions) -> _Wanted:
    from ringloader._features.devices import resolve

    rules.boolean(by_name.STATEFUL, stateful)
    options = by_name.checked(function, given)
    resolve(options.device)
    if stateful:
        stateful_class.check(function)
    return _Wanted(functools.partial(make_iterator, options), stateful)


def make_iterator(options: Options, loader: TorchLoader, previous: Callable[[Any], Any]) -> Any:
    """Returns the iterator of any torch loader; ``previous`` makes it without ringloader."""
    import ringloader._features.all as features
    import ringloader.dataloader as dataloader
    from ringloader._core import notes
    from ringloader._core.feature import Hook
    from ringloader._core.make import make_iterator as make
    from ringloader._features import conflicts
    from ringloader._torch import internals

    always = getattr(type(loader), "_ringloader_always", ())
    hook_at = Hook(previous, lambda: previous(loader), features, always)
    if isinstance(loader, dataloader.DataLoader):
        # This loader found torch's `_get_iterator` replaced, perhaps by a wrapper around this hook. So the
        # function that the hook replaced decides, and the options are the loader's own.
        options = options_of(loader)
        return make(loader, options, hook_at)
    if internals.is_in_worker():
        # A loader inside a dataset: the options that work when epochs begin are meant for loaders of the
        # main process.
        options = conflicts.in_worker(options, is_installed=True)
    # The program's choice for this loader wins: options that conflict with it are left out, and the report
    # says so.
    options, aside = conflicts.fitting(loader, options)
    made = make(loader, options, hook_at)
    for text in aside:
        notes.add(loader, text)
    return made
