"""Replication chains in the pool map: placement, rebalancing, and changes after failures."""
