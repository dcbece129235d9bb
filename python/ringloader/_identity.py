"""The identity of this process."""

from __future__ import annotations

import os
from collections.abc import Callable

import ringloader._native as _native

# Returns a number that a forked child does not share with its parent.
process_identity: Callable[[], int] = _native.process_identity if _native.SUPPORTED else os.getpid
