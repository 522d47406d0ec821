"""Compiled fast path for the commonest requests; fuse/kernel/dispatch handles all others."""
