"""Reads of blocks through a file descriptor: preadv2 and io_uring."""
