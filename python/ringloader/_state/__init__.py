"""``state_dict`` and ``load_state_dict``: where an epoch is, and how another one goes on from there."""
