"""A run on one page, in one picture, in one record."""
