"""Iterators with and without workers, how they are made, and the protocol of a feature."""
