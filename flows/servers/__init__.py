"""Prefect, MLflow and a worker."""
