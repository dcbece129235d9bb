"""The states of ``StatefulDataLoader``, as iterators find them. MIRRORS _common/states.py::States."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringloader._state.datasets import is_asked as ask_dataset
from ringloader._state.datasets import option_for as worker_option
from ringloader._state.torchs import begin as begin_torchs
from ringloader._state.tracked import begin, has_begun, loaded_of

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

__all__ = [
    "ask_dataset",
    "begin",
    "begin_torchs",
    "has_begun",
    "is_loaded",
    "worker_option",
]


def is_loaded(loader: TorchLoader) -> bool:
    """True if a state was loaded, with which the next epoch begins."""
    return loaded_of(loader) is not None
