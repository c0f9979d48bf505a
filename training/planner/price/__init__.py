"""What a layout costs: one step of it, in bytes and in seconds, for each of its ranks."""
