"""Files behind URLs: on object stores and the web."""
