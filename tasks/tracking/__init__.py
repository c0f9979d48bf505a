"""The MLflow run and its true status."""
