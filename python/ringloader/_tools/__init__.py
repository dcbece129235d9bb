"""Commands for users: ``ringloader bench`` and ``ringloader.doctor()``."""
