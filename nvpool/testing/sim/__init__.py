"""Deterministic simulation of a whole pool in one process, on virtual time. See `scenario`."""
