"""Sealed shared memory for the processes of one mount; it outlives each of these processes."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_sealed(name: str, byte_count: int, head: bytes) -> int:
    """Return the descriptor of new shared memory: `head`, followed by zeros.

    The descriptor is closed on exec. The size is sealed, so a process that maps the memory cannot get SIGBUS.
    OSError: the system refused; nothing remains open.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, byte_count)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(descriptor, head, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
