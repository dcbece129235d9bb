"""What runs in the main process, behind the loader."""
