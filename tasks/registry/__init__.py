"""Model versions, aliases and tags in the MLflow registry."""
