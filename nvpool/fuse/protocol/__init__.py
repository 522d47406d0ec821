"""Encoding and decoding of the FUSE kernel protocol (linux/fuse.h, 7.31 to 7.45), without I/O.

`constants` names operations and flags, `requests` decodes the kernel's requests, `replies` encodes replies
and notifications. Used by `fuse/kernel/connection` and tests. Every length is checked: invalid bytes raise
requests.Malformed, never another error.
"""
