"""The config of a run: one section a file, `RunConfig` in run.py."""
