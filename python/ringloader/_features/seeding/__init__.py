"""``seeding=``, ``set_epoch`` and ``worker_reset_fn``: seeds, and the numbers of epochs."""
