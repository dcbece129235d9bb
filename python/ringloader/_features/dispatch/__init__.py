"""One process that reads a source for all workers."""
