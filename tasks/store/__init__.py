"""Keeps runs on an object store, from which another machine goes on."""
