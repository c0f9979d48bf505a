"""The `shardline` command."""
