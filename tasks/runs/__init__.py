"""A run's folder: its records, its owner, how it is resumed."""
