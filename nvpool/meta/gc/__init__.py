"""Removal of the chunks of deleted and truncated files."""
