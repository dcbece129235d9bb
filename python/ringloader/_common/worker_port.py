"""The worker's end of the transport in this process, for collation that is not torch's."""

from __future__ import annotations

import ringloader._native as _native

# None in a process that is no worker of ours. One that a worker forks gets no memory of it.
port: _native.Port | None = None
