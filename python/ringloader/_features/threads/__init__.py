"""``worker_method="thread"``: threads as workers."""
