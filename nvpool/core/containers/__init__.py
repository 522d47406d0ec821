"""Bounded containers: dictionaries with a maximum size, and a pool of reusable buffers."""
