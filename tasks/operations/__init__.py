"""Shows what runs, stops it, and queues runs for GPUs."""
