"""Chunks on a drive: index, reads, writes, truncation and verification."""
