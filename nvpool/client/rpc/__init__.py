"""Calls to the metadata service: sessions, retries, exactly-once changes."""
