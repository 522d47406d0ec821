"""Compiled handling of the commonest requests; each steps aside for fuse/kernel/dispatch where it does not apply."""
