"""Datasets and collation of ringloader."""
