"""Writes of files: writeback, quota reservations and the crash journal.

`writeback` is the entry point. Used by `vfs` and `read`.
"""
