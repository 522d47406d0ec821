"""Metadata service: names, attributes, locks, leases and volumes of one shard."""
