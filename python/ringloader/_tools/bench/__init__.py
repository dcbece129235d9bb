"""``python -m ringloader bench``: a program's own loader, measured as torch's and as ringloader's."""
