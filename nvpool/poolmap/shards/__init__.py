"""Metadata shards in the pool map: members, partitions, migrations and placement."""
