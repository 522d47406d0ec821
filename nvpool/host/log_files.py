"""Log files are opened here: new ones can be read by their owner and group alone.

Called by runtime/logging_setup, also in the holder of a mount, which is to stay small, and by commands that start a daemon.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import BinaryIO

LOG_MODE = 0o640


def open_log(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at `path` for appending, unbuffered; a new one is for its owner and group alone."""
    return open(path, "ab", buffering=0, opener=log_opener)


def log_opener(path: str, flags: int) -> int:
    """For open(): new files are LOG_MODE; one of ours that others may read is mended."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, LOG_MODE)
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o007:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~0o007)
    return descriptor
