"""torch's own ``collate_fn`` in a worker: native while nobody has changed what it is made of."""

from __future__ import annotations

from typing import Any

from ringloader import _native, _seam


def native(argument: Any, port: _native.Port) -> Any:
    """A native callable for torch's own ``default_collate`` or ``default_convert``; all else as it is."""
    parts = _seam.parts_of_collation(argument)
    if not parts or _seam.replaced_control() is not None:
        return argument
    if argument is _seam.default_convert:
        return _native.Convert(argument, parts)
    return _native.Collate(port, argument, parts, _seam.MODES, _seam.collate, _seam.collate_fn_map)
