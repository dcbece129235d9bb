"""``stats=True``: where the time of an epoch goes."""
