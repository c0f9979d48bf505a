"""Machines: measured, checked, and reached."""
