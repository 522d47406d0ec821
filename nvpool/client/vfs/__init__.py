"""The POSIX operations of a client, on inode numbers and names.

Names are bytes; errors are those of core/errors. This package guarantees close-to-open consistency between
clients. On one client every operation sees the effects of all earlier operations. `filesystem` is the entry
point: its class has all operations, and each other class of operations is a part of it. Used by
fuse/ops/operations and by the SDK. This package never checks permissions (for a mount the kernel does) and never retries: the
packages below do.
"""
