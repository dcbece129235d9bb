"""``call_workers``: a function runs in each worker."""
