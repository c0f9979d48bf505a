"""Programs on ranks, on this machine or on Docker hosts, and what happens when they fail."""
