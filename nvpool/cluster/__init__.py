"""Coordination of a pool: stores the pool map, leases and the leader, and makes map changes."""
