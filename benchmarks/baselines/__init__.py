"""Programs that people train with today, on the same model, batches and precision as Shardline: one a file."""
