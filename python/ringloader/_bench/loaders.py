"""The user's loader with other workers, and as torch's or ringloader's."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch

from ringloader._bench.configuration import PROCESS, Configuration
from ringloader._bench.errors import TargetError
from ringloader._bench.target import Target
from ringloader._patch.convert import convert
from ringloader._patch.install import uninstall
from ringloader._torch import hook, internals
from ringloader.dataloader import DataLoader


def make(target: Target, configuration: Configuration, **options: Any) -> Any:
    """Calls the user's function, and returns its loader in a configuration.

    Dataset, sampler, collation and all other arguments stay the user's. All generators have the same seed
    before the user's code runs.

    Args:
        target: The function.
        configuration: The loader that is wanted.
        **options: More options of ringloader's loader.

    Raises:
        TargetError: If the function gives no loader.
        TypeError: If ringloader cannot reach its class.
        ValueError: If an option does not go with the loader.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # With one: `persistent_workers=True` and others are errors without workers.
    loader = target.call(max(configuration.num_workers, 1))
    if not isinstance(loader, internals.Loader):
        raise TargetError(f"{target} returns no DataLoader, but an object of {type(loader)}")
    # The program may have called it.
    uninstall()
    _set_workers(loader, configuration.num_workers)
    is_ours = isinstance(loader, DataLoader)
    if configuration.loader == "torch":
        if is_ours:
            # torch's iterator for any class of ours. Its options mean nothing to it.
            get_iterator = hook.beneath(internals.Loader._get_iterator)
            object.__setattr__(loader, "_get_iterator", functools.partial(get_iterator, loader))
        return loader
    if is_ours or configuration.worker_method != PROCESS:
        options["worker_method"] = configuration.worker_method
    return convert(loader, **options)


def _set_workers(loader: Any, number: int) -> None:
    """Sets what torch's constructor makes of ``num_workers``."""
    loader.num_workers = number
    if number:
        loader.prefetch_factor = loader.prefetch_factor or 2
    else:
        loader.prefetch_factor = None
        loader.timeout = 0
