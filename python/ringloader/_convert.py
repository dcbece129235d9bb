"""The name that pickles of converted loaders have for what rebuilds them, from before version 0.2."""

from ringloader._patch.convert import _rebuild

__all__ = ["_rebuild"]
