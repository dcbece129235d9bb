"""Parts that every process with ringloader has: the main process and its workers."""
