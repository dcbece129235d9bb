"""Datasets that are arrays: a batch is one gather of rows."""
