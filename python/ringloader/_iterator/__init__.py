"""Iterators: with workers, without workers, and torch's own."""
