"""Workers that are threads of the main process."""
