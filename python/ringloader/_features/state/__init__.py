"""``state_dict`` and ``load_state_dict``: the position in an epoch, and the resume from it."""
