"""``stats=True``: where the time of an epoch goes."""

from __future__ import annotations

from ringloader._features import checks
from ringloader._features.about import option

STATS = option(
    False,
    check=checks.boolean,
    on_torchs="works",
    # The clock is native.
    off_linux="is left out",
)

RULES = ()
