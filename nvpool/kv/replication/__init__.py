"""Replication of the key-value engine: the primary ships its log to standbys."""
