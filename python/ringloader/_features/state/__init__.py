"""``state_dict`` and ``load_state_dict``: the position in an epoch, and the resume from it."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import option

SNAPSHOT_EVERY_N_STEPS = option(
    1,
    check=rules.integer(1, or_none=True),
    on_torchs="is left out",
    instead="use ringloader.StatefulDataLoader, whose loaders have a state",
    is_of_states=True,
)

RULES = ()
