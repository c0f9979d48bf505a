"""A registered model over HTTP."""
