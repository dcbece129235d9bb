"""Reports to the user about a loader."""
