"""The file system as every front end sees it: POSIX operations on inode numbers, names as bytes, errors of base/errors.

Guarantees close-to-open consistency between clients and, on one client, that every operation sees what those before it did.
Called by fuse/ops and sdk. It never checks who may do what (the kernel does, for a mount) and never retries: parts below do.
"""

from __future__ import annotations

from nvpool.client.vfs.contract import (
    KEEP_SIZE,
    NOW,
    PUNCH_HOLE,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    XATTR_CREATE,
    XATTR_REPLACE,
    ZERO_RANGE,
    Caller,
    DirHandle,
    FileHandle,
    StatFs,
)
from nvpool.client.vfs.listing import Listing
from nvpool.client.vfs.many import Many
from nvpool.client.vfs.ranges import Ranges
from nvpool.client.vfs.takeover import TakeOver
from nvpool.client.vfs.wholes import Wholes

__all__ = ["KEEP_SIZE", "NOW", "PUNCH_HOLE", "RENAME_EXCHANGE", "RENAME_NOREPLACE", "XATTR_CREATE", "XATTR_REPLACE",
           "ZERO_RANGE", "Caller", "DirHandle", "FileHandle", "StatFs", "Vfs"]


class Vfs(Many, Ranges, Listing, TakeOver, Wholes):
    """Made by client/session."""
