"""Consistency check of a whole pool: metadata, replicas and lost files."""
