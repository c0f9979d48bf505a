"""Text from a model: the engines and how one is chosen."""
