"""What a run is asked to be: one section a file, `RunConfig` in run.py."""
