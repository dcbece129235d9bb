"""Data loaders side by side: rate, processor time and memory, each row checked for equal batches first.

Run from the repository root: ``python -m benches.python``.
"""
