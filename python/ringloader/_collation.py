"""torch's own collation in a worker: native while nobody has changed what it is made of."""

from __future__ import annotations

from typing import Any

from ringloader import _native, _seam


def replace_collate(port: _native.Port) -> None:
    """Lets torch's ``default_collate`` work natively, whoever calls it, and write into the slot."""
    if _seam.collates_as_torch():

        def make(torchs_own: Any) -> _native.Collate:
            return _native.Collate(
                port,
                torchs_own,
                _seam.parts_of_collate(),
                _seam.MODES,
                _seam.collate_fn_map,
                _seam.others_in_collate(),
            )

        _seam.replace_collate(make)


def native(argument: Any) -> Any:
    """A native callable for torch's own ``default_convert``; anything else as it is."""
    parts = _seam.parts_of_convert(argument)
    if not parts or _seam.replaced_control() is not None:
        return argument
    return _native.Convert(argument, parts)
