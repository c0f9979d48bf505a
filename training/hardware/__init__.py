"""Measurements of GPU links and of the network between ranks."""
