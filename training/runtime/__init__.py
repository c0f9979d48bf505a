"""A rank's process: start, mesh, watchdog."""
