"""``worker_task="sample"``: all workers make the samples of a batch together."""
