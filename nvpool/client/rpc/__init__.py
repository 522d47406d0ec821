"""Calls to the metadata service: sessions, retries, exactly-once changes.

`meta_client` is the entry point. Used by `vfs`, `write` and `data`.
"""
