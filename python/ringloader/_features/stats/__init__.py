"""``stats=True``: where the time of an epoch goes."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import option

STATS = option(
    False,
    check=rules.boolean,
    on_torchs="works",
    # The clock is native.
    off_linux="is left out",
)

RULES = ()
