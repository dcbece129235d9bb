"""Batches that do not come in time: messages about them, errors, and samples that take too long."""
