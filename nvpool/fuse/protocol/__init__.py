"""The FUSE kernel protocol (linux/fuse.h, 7.31 to 7.45) between bytes and numbers, without I/O.

`numbers` names operations and flags, `requests` takes apart what the kernel asks, `replies` makes what it is told. Called by
`fuse/kernel/connection` and tests. Every length is checked; what is no request is requests.Malformed, never another error.
"""
