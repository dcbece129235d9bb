"""Lists and arrays in shared memory."""
