"""Requests to a shard: their handlers, and what the handlers share."""
