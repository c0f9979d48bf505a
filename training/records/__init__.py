"""The files that each stage leaves for the next one."""
