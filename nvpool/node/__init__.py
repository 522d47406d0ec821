"""Supervisor of a node: its processes, and its share in running the pool."""
