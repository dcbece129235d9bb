"""The commands of ``python -m ringloader``."""
