"""What this machine, this Python and this torch mean for ringloader."""
