"""The format of token shards, written and read."""
