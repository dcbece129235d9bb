"""Functions that make a batch from a list of samples: pass them as ``collate_fn`` to any loader.

Compose them: ``Group(Pad(), Stack())`` pads the first field of each sample, and stacks the second. All can be
pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from ringloader._data.pad import Pad, as_tensor

__all__ = ["Append", "AsList", "Dict", "Group", "Pad", "Stack"]

_BatchFunction = Callable[[Sequence[Any]], Any]

# The name that users' pickles have for it.
Pad.__module__ = __name__


class Stack:
    """Stacks samples of equal shape. Calls torch's ``default_collate``.

    - Tensors are stacked as by ``torch.stack``.
    - Arrays and numbers become tensors.
    - Strings become a list.
    - Dicts, tuples and lists are stacked field by field, so a list of lists is stacked by columns. ``Pad()``
      stacks lists of numbers by rows.
    """

    def __call__(self, samples: list[Any]) -> Any:
        """Makes a batch of samples."""
        return default_collate(samples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Append:
    """Makes a list of tensors, one for each sample. Each tensor keeps its shape.

    Without workers, a tensor uses the memory of its sample, as in torch's loader with ``batch_size=None``.

    Args:
        expand: True adds a batch dimension of 1 in front: ``[1, *size]``.

    Raises:
        TypeError: If ``expand`` is not a bool. When called: if a sample is not a tensor, array, number or
            list of numbers.
    """

    def __init__(self, expand: bool = True) -> None:
        if not isinstance(expand, bool):
            raise TypeError(f"'expand' must be True or False, not {expand!r}")
        self._expand = expand

    def __call__(self, samples: Sequence[Any]) -> list[torch.Tensor]:
        """Makes a list of tensors of samples."""
        tensors = [as_tensor(sample, number) for number, sample in enumerate(samples)]
        return [tensor.unsqueeze(0) for tensor in tensors] if self._expand else tensors

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self._expand else 'expand=False'})"


class AsList:
    """Makes a list of the samples, unchanged. Samples may be of any kind."""

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """Makes a list of samples."""
        return list(samples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Group:
    """Makes a tuple of batches, one for each field of the samples. Samples are tuples or lists.

    Args:
        fns: One function for each field. Each takes a list of samples. You may also pass one list of
            functions.

    Raises:
        TypeError: If a function is not callable. When called: if a sample is not a tuple or list.
        ValueError: If there are no functions. When called: if a sample has more or fewer fields than there
            are functions.
    """

    def __init__(self, *fns: _BatchFunction | Sequence[_BatchFunction]) -> None:
        given: Sequence[Any] = fns
        if len(fns) == 1 and isinstance(fns[0], (list, tuple)):
            given = fns[0]
        if not given:
            raise ValueError("Group needs a function for each field of the samples, and there are none")
        for number, fn in enumerate(given):
            if not callable(fn):
                raise TypeError(f"function {number} of Group must be callable, not {fn!r}")
        self._fns = tuple(given)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Makes a tuple of as many batches, or a named tuple if the first sample is one."""
        for number, sample in enumerate(samples):
            if not isinstance(sample, (tuple, list)):
                raise TypeError(f"sample {number} must be a tuple or list for Group, not {sample!r}")
            if len(sample) != len(self._fns):
                raise ValueError(
                    f"Group has {len(self._fns)} functions, but sample {number} has {len(sample)} fields; "
                    "give it one for each"
                )
        made = tuple(fn([sample[field] for sample in samples]) for field, fn in enumerate(self._fns))
        named: Any = type(samples[0]) if samples else tuple
        return named(*made) if hasattr(named, "_fields") else made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._fns))})"


class Dict:
    """Makes a dict of batches, one for each key of the samples. Samples are dicts or other mappings.

    Each sample must have exactly the keys that have a function, in any order. So no key is lost unnoticed.

    Args:
        fns: One function for each key. Each takes a list of samples.
        named: More functions, as keyword arguments.

    Raises:
        TypeError: If a function is not callable. When called: if a sample is not a mapping.
        ValueError: If there are no functions.
        KeyError: When called: if a sample lacks a key, or has a key without a function.
    """

    def __init__(self, fns: Mapping[Any, _BatchFunction] | None = None, /, **named: _BatchFunction) -> None:
        if fns is not None and not isinstance(fns, Mapping):
            raise TypeError(f"Dict takes functions by key, not {fns!r}")
        self._fns = {**(fns or {}), **named}
        if not self._fns:
            raise ValueError("Dict needs a function for each key of the samples, and there are none")
        for key, fn in self._fns.items():
            if not callable(fn):
                raise TypeError(f"the function of Dict for the key {key!r} must be callable, not {fn!r}")

    def __call__(self, samples: Sequence[Any]) -> dict[Any, Any]:
        """Makes a dict of as many batches, with the keys in the order of the functions."""
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                raise TypeError(f"sample {number} must be a dict for Dict, not {sample!r}")
            for key in self._fns:
                if key not in sample:
                    raise KeyError(f"sample {number} has no key {key!r}, for which Dict has a function")
            if len(sample) > len(self._fns):
                key = next(key for key in sample if key not in self._fns)
                raise KeyError(
                    f"sample {number} has the key {key!r}, for which Dict has no function; give it one, "
                    "such as AsList(), or leave the key out of the samples"
                )
        return {key: fn([sample[key] for sample in samples]) for key, fn in self._fns.items()}

    def __repr__(self) -> str:
        if all(isinstance(key, str) and key.isidentifier() for key in self._fns):
            return f"{type(self).__name__}({', '.join(f'{key}={fn!r}' for key, fn in self._fns.items())})"
        return f"{type(self).__name__}({self._fns!r})"
