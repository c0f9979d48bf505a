"""SHARDLINE_HOME, processes and locks of this machine."""
