"""Challenger to champion: gates, roll-out, journal, lock."""
