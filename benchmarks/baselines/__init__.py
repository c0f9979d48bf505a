"""What people train with today, each on the same model, batches and precision as Shardline: one program a file."""
