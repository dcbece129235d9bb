"""The parts of torch's ``default_collate``, and what others taught it."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import numpy
import torch
import torch.utils.data

from ringloader._torch import internals

# A torch without one of these collates itself.
_collation: Any = torch.utils.data._utils.collate
_MAP = "default_collate_fn_map"
collate_fn_map: dict[Any, Any] = getattr(_collation, _MAP, {})
# Functions of torch that collation calls, and torch's own entries of that map.
_COLLATING = ("stack", "tensor", "as_tensor")
_COLLATE_FN_MAP: dict[Any, str] = {
    torch.Tensor: "collate_tensor_fn",
    numpy.ndarray: "collate_numpy_array_fn",
    (numpy.bool_, numpy.number, numpy.object_): "collate_numpy_scalar_fn",
    float: "collate_float_fn",
    int: "collate_int_fn",
    str: "collate_str_fn",
    bytes: "collate_str_fn",
}


def parts_of_collate() -> list[tuple[dict[str, Any], str, Any]]:
    """Returns the parts that torch's ``collate`` uses: variables, a name in them, its value."""
    calls = [(vars(torch), name, getattr(torch, name)) for name in _COLLATING]
    return [*calls, (vars(_collation), _MAP, collate_fn_map)]


def parts_of_convert(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Returns the same for ``default_convert``; nothing for any other function, and where it was replaced."""
    ours, name = vars(_collation), "default_convert"
    is_own = function is ours.get(name) and internals.is_torchs_own(function, name)
    return [(ours, name, function)] if is_own else []


def parts_of_default_collate() -> list[tuple[dict[str, Any], str, Any]]:
    """Returns the parts that torch's ``default_collate`` calls, and itself."""
    ours = vars(_collation)
    return [*parts_of_collate(), *((ours, name, ours[name]) for name in ("collate", "default_collate"))]


def is_default_collate(function: Any) -> bool:
    """True if ``function`` is torch's own ``default_collate``."""
    own = function is getattr(_collation, "default_collate", None)
    return own and internals.is_torchs_own(function, "default_collate")


def collate_of_columns() -> Any:
    """Returns the function that ``default_collate`` calls, and that calls itself for items of containers."""
    return _collation.collate


def collate_within(function: Any, stand_in: type) -> Any:
    """Returns the ``stand_in`` that ``function`` calls, if that is torch's ``default_collate``; else None."""
    collate = getattr(_collation, "collate", None)
    return collate if type(collate) is stand_in and is_default_collate(function) else None


def collates_rows(function: Any, stand_in: type) -> bool:
    """True if ``function`` is torch's ``default_collate``, and makes of arrays' rows what torch taught it.

    In a worker ``stand_in`` is the class of what may stand in for the ``collate`` that this calls.
    """
    return is_default_collate(function) and collates_as_torch(stand_in) and not others_collate_rows()


def others_collate_rows() -> bool:
    """True if others taught ``default_collate`` what to make of arrays' rows, tuples or dicts."""
    for other in others_in_collate():
        for cls in other if isinstance(other, tuple) else (other,):
            if not isinstance(cls, type) or issubclass(cls, (numpy.generic, numpy.memmap)):
                return True
            if any(issubclass(kind, cls) for kind in (tuple, dict, numpy.generic, numpy.ndarray)):
                return True
    return False


def collates_as_torch(stand_in: type | tuple[()] = ()) -> bool:
    """True if torch's ``default_collate`` has its own parts still, or a stand-in of ours."""
    collate = getattr(_collation, "collate", None)
    parts = [getattr(_collation, "default_collate", None), collate, *map(vars(torch).get, _COLLATING)]
    parts += [*collate_fn_map, *collate_fn_map.values()]
    # A program may put another map in its place.
    is_same_map = getattr(_collation, _MAP, None) is collate_fn_map
    if is_same_map and parts == _own:
        return True
    found = (
        is_same_map
        and internals.is_torchs_own(getattr(_collation, "default_collate", None), "default_collate")
        and (isinstance(collate, stand_in) or internals.is_torchs_own(collate, "collate"))
        and list(collate_fn_map)[: len(_COLLATE_FN_MAP)] == list(_COLLATE_FN_MAP)
        and all(internals.is_torchs_own(collate_fn_map[key], name) for key, name in _COLLATE_FN_MAP.items())
        and all(isinstance(getattr(torch, name), BuiltinFunctionType) for name in _COLLATING)
    )
    if found and not isinstance(collate, stand_in):
        _own[:] = parts
    return found


# Parts that were found to be torch's own: the same ones need no other look.
_own: list[Any] = []


def others_in_collate() -> list[Any]:
    """Returns the classes that others taught torch's ``default_collate``: those of another map are theirs."""
    current: dict[Any, Any] = getattr(_collation, _MAP, collate_fn_map)
    return list(current)[len(_COLLATE_FN_MAP) if current is collate_fn_map else 0 :]


def replace_collate(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of the ``collate`` that torch's ``default_collate`` calls."""
    _collation.collate = make(_collation.collate)
