"""Rows of metrics: on disk first, then sent to MLflow."""
