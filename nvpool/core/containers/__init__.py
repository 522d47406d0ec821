"""Containers with a bound: of entries, and of buffers that are used again."""
