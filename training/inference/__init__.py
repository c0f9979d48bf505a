"""Text from a model, by torch ranks."""
