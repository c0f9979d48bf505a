"""What runs, how it is stopped, and who waits for GPUs."""
