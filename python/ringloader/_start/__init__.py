"""Starts and ends of processes."""
