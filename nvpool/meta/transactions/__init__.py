"""Transactions over several shards: two-phase commit."""
