"""A model on held-out text and on downstream tasks."""
