"""``device=``: batches on a device."""
