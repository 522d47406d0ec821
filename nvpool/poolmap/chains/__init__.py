"""Replication chains in the pool map: placement, rebalancing, changes on failure."""
