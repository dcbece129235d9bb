"""Parts of a worker: its loop, and what runs around it."""
