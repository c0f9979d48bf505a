"""Metrics of a run while it trains: losses, rates, memory, profiles."""
