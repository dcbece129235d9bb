"""What is known of torch's internals, and which path follows from it."""
