"""What runs in a worker process, around torch's own loop."""
