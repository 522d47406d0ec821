"""Fakes and in-process parts of a pool."""
