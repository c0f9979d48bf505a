"""What is read of a run while it trains: rates, memory, profiles."""
