"""``main_prefetch=``: batches are decoded before their turn."""
