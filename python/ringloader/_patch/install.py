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
from ringloader._patch.by_name import GivenOptions
from ringloader._torch import hook

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def install(*, stateful: bool = False, **options: Unpack[GivenOptions]) -> None:
    """Makes every ``torch.utils.data.DataLoader`` of this process use ringloader.

    This includes existing loaders, subclasses, and loaders that libraries make. ``ringloader.report`` says
    which path a loader took, and why. Existing iterators do not change. A class with its own
    ``_get_iterator`` that does not call torch's keeps its iterators. torchdata's ``StatefulDataLoader`` is
    such a class: ``stateful`` replaces it.

    A loader ignores an option that it cannot combine with its arguments or its dataset, and
    ``ringloader.report`` says so. These options are ignored:

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
    - ``prefetch_epochs`` with an ``IterableDataset`` or a dataset that has a ``state_dict``, without
      ``persistent_workers`` or ``worker_pool``, or with ``worker_method="thread"``, if the dataset has
      ``set_epoch``.

    A loader that a dataset makes in a worker process ignores ``device``, ``device_transform`` and
    ``num_workers``, because the main process moves the worker's batches. It also ignores ``worker_reset_fn``,
    ``seeding`` and ``seed``, which are for loaders of the main process.

    Forked children inherit the change. Other child processes do not, unless their environment says so (see
    without-changing-code.md). A second call replaces the options of the first.

    If other code replaced ``DataLoader._get_iterator`` before, loaders call that method, and take torch's
    path. If other code replaces it later and calls the old method, that call returns ringloader's iterators.

    Args:
        stateful: True to replace torchdata's ``StatefulDataLoader`` by ``ringloader.StatefulDataLoader``, in
            all modules that have imported it by name or import it later. Existing objects and subclasses do
            not change, and the log names the subclasses. ``**options`` do not apply to the class. torch's
            ``DataLoader`` gets no ``state_dict``.
        **options: The keyword-only arguments of ``ringloader.DataLoader``, for loaders of any other class.
            Options that are not given have their defaults.

    Raises:
        TypeError: If an option is unknown, or has the wrong type.
        ValueError: If a value is out of range, or its device does not exist.
        ModuleNotFoundError: For ``stateful=True`` without torchdata.
        RuntimeError: For ``stateful=True`` on macOS and Windows.
    """
    _put(_wanted("install()", stateful, options))


def uninstall() -> None:
    """Undoes ``ringloader.install``: loaders that are not ringloader's own iterate as before.

    You may call it at any time, also after other code has wrapped ``DataLoader._get_iterator``. Existing
    iterators continue. A ``StatefulDataLoader`` of ringloader that was made in place of torchdata's stays
    one. Without an ``install``, the call does nothing.
    """
    _put(_Wanted(None, stateful=False))


def installed(
    *, stateful: bool = False, **options: Unpack[GivenOptions]
) -> contextlib.AbstractContextManager[None]:
    """Calls ``ringloader.install`` for a ``with`` block, and restores the earlier state and options after it.

    The change affects all threads of the process.

    Args:
        stateful: As ``ringloader.install`` takes it.
        **options: As ``ringloader.install`` takes them. This call checks them, before ``with``.

    Raises:
        TypeError: If an option is unknown, or has the wrong type.
        ValueError: If a value is out of range, or its device does not exist.
        ModuleNotFoundError: For ``stateful=True`` without torchdata.
        RuntimeError: For ``stateful=True`` on macOS and Windows.
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
    before = _Wanted(hook.current(), stateful_class.is_put)
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
        options = features.in_worker(options, is_installed=True)
    # The program's choice for this loader wins: options that conflict with it are left out, and the report
    # says so.
    options, aside = features.fitting(loader, options)
    made = make(loader, options, hook_at)
    for text in aside:
        notes.add(loader, text)
    return made
