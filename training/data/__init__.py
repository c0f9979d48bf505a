"""Token shards to batches."""
