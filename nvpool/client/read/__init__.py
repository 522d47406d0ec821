"""Reads of files: read-ahead, batches, and reads by the calling thread."""
