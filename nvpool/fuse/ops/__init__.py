"""Meaning of the requests of a mount, whatever the engine."""
