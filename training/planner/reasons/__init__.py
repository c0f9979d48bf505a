"""Sentences for people: why something was chosen, and why something cannot be, with the numbers and the cure."""
