"""Serves a registered model over HTTP."""
