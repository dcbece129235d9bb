"""Workers on other machines, over Ray. Needs Ray: ``pip install 'ringloader[ray]'``."""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("ringloader.ray needs Ray: pip install 'ringloader[ray]'") from error

from ringloader._ray.workers import Workers

# The name under which users import it.
Workers.__module__ = __name__

__all__ = ["Workers"]
