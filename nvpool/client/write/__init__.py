"""Writes of files: writeback, quota reservations and the journal for crashes."""
