"""Strategies side by side, and a run beside its repetition."""
