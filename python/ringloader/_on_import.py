"""The address at which the distribution ringloader-autoinstall, of any version, finds what it calls."""

from ringloader._patch.on_import import install_with_torch

__all__ = ["install_with_torch"]
