"""Chunk store: one target, its drive and its part in replication chains."""
