"""Coordinator of a pool: holds the pool map and decides its changes."""
