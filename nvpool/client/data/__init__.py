"""Reads and writes of chunks at stores, and local reads that bypass them."""
