"""Places for batches: pinned memory, devices, and decoding before their turn."""
