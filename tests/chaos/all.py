"""Every case there is."""

from chaos import deaths, ends, errors, leaks, limits, memory, signals, stopped
from chaos.case import CASES

MODULES = (deaths, stopped, signals, errors, limits, memory, ends, leaks)

__all__ = ["CASES", "MODULES"]
