"""Transports: tasks to the workers of an iterator, and batches back."""
