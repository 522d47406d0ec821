"""Coordinator of a pool: stores the pool map, leases and the leader, and decides map changes."""
