"""FUSE adapter: turns the kernel's requests into calls of the client library."""
