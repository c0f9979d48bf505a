"""Checkpoints: written, found, verified, loaded, deleted."""
