"""Kernel engine: the FUSE protocol on /dev/fuse, with dispatch, notifications and read workers."""
