"""Our flows in Prefect: their decorator, artifacts and links."""
