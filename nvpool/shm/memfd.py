"""Memory that several processes of one mount share, and that outlives each of them."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_sealed(name: str, byte_count: int, head: bytes) -> int:
    """A descriptor of new memory of so many bytes, zeros behind `head`; exec closes it, and nobody can change its size: who has
    mapped it can not meet SIGBUS. OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, byte_count)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(descriptor, head, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
