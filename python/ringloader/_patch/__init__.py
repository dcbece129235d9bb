"""Ways in: other loaders of the process over ringloader."""
