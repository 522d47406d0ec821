"""Log files: opened so that only the owner and the group can read new ones.

Used by runtime/logging_setup, also in the holder process of a mount, which must stay small, and by commands
that start a daemon.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import BinaryIO

LOG_MODE = 0o640


def open_log(path: str | os.PathLike[str]) -> BinaryIO:
    """Open the file at `path` for appending, unbuffered.

    A new file is readable by its owner and group only.
    """
    return open(path, "ab", buffering=0, opener=log_opener)


def log_opener(path: str, flags: int) -> int:
    """Opener for open(): creates files with LOG_MODE, and removes the permissions of others from our own
    files."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, LOG_MODE)
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o007:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~0o007)
    return descriptor
