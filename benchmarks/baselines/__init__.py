"""Programs that Shardline is compared with, one per file; trainers use its model, batches and precision."""
