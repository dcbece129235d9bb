"""``limit``, ``pause``, ``resume`` and ``shutdown`` of iterators."""
