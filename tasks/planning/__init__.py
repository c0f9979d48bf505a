"""Config, machines and shards to a plan."""
