"""Metadata shards in the pool map: members, partitions, placement."""
