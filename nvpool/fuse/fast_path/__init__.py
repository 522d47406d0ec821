"""Compiled fast path for the commonest requests; fuse/dispatch handles all others."""
