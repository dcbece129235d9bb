"""Facts about torch's internals, and the path that follows from them."""
