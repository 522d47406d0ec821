"""Kernel engine: the FUSE protocol on /dev/fuse, with mounting, replay after a restart, and read workers."""
