"""The file system as every front end sees it: POSIX operations on inode numbers, names as bytes, errors of core/errors.

Guarantees close-to-open consistency between clients and, on one client, that every operation sees what those before it did.
Called by fuse/ops/operations and sdk. It never checks who may do what (the kernel does, for a mount) and never retries: parts
below do.
"""
