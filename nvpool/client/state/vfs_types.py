"""Types of the Vfs interface: callers, handles, flags and sizes.

Used by fuse/ops/operations and the SDK, which never look inside a handle.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from nvpool.client.state.metadata_cache import OpenInode

NOW = "now"
"""A time of setattr (atime_ns, mtime_ns): the present time by the service's clock."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
XATTR_CREATE, XATTR_REPLACE, XATTR_KILL_SET_GID = 1, 2, 4
"""Flags of setxattr. With the third, setting an access control list removes set-gid from the mode."""
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
"""Modes of fallocate(2), as in linux/falloc.h; the other modes are not supported."""


class Caller(NamedTuple):
    """The user on whose behalf an operation runs; owns the files that the operation creates.

    The front end checks permissions before it calls the Vfs (for a mount, the kernel does). `umask` applies
    to created files, unless the directory has a default access control list.
    """

    uid: int
    gid: int
    pid: int = 0
    umask: int = 0

    def masked(self, mode: int) -> int:
        """The permission bits of `mode` that the umask removes."""
        return mode & self.umask & 0o777


class FrontEndCallbacks:
    """Callbacks of a front end that caches bytes, attributes or names beyond a call, as a mount's kernel does.

    The defaults are those of a front end that caches nothing.
    """

    __slots__ = ("on_lost", "on_recall", "on_reported")

    def __init__(self) -> None:
        self.on_lost: Callable[[int], None] = lambda inode: None
        """Called when the locks on an open inode are lost. Must not wait.

        The front end must not show cached bytes of this inode any more.
        """
        self.on_recall: Callable[[list[int]], Awaitable[None]] = _nothing
        """Called with inodes whose leases have ended because other clients are about to change them.

        The other clients make their changes when this callback returns, so the callback must return soon.
        """
        self.on_reported: Callable[[int, int], None] = lambda inode, change: None
        """Called with an inode and its change number after the client has reported its own writes.

        If the change number has grown by more than one, other clients have changed the inode too.
        """


async def _nothing(inodes: list[int]) -> None:
    """Default recall callback: nothing is cached, so there is nothing to drop."""


class StatFs(NamedTuple):
    """The sizes that statfs(2) shows."""

    blocks_total: int
    blocks_free: int
    blocks_available: int
    """Blocks that can be written until the first chain is full."""
    block_bytes: int
    files_total: int
    files_free: int
    name_bytes_max: int


class ReadAheadUnit:
    """A unit of read-ahead bytes, fetched or in flight."""

    __slots__ = ("future", "bytes", "born_s", "end")

    def __init__(self, future: asyncio.Future, count: int, born_s: float, end: int):
        self.future = future
        self.bytes = count
        self.born_s = born_s
        # end of the file within the unit at the fetch; behind it the last block has only zeros
        self.end = end


class ReadAheadState:
    """The read-ahead state of a handle: its position, and the fetched units."""

    __slots__ = ("next", "run", "reads", "units", "window", "far")

    def __init__(self) -> None:
        self.next = 0  # where the next sequential read begins
        self.run = 0  # bytes read in sequence
        self.reads = 0  # reads in sequence
        self.units: dict[int, ReadAheadUnit] = {}
        self.window = 0
        self.far = 0  # first unit that was never fetched in this run


_ACCESS, _READS_ONLY, _WRITES_ONLY, _APPEND = os.O_ACCMODE, os.O_RDONLY, os.O_WRONLY, os.O_APPEND


class FileHandle:
    """An open file. Belongs to its opener until `release`."""

    __slots__ = (
        "file",
        "inode",
        "flags",
        "readable",
        "writable",
        "append",
        "ahead",
        "closed",
        "number",
        "reported_error",
    )

    def __init__(self, file: OpenInode, flags: int):
        self.file = file
        self.inode = self.file.inode
        self.flags = flags
        self.readable = self.flags & _ACCESS != _WRITES_ONLY
        self.writable = self.flags & _ACCESS != _READS_ONLY
        self.append = self.writable and self.flags & _APPEND != 0
        self.ahead = ReadAheadState()
        self.closed = False
        self.number = 0  # by which a successor process knows the handle; 0 without mount state
        # the last write error that this handle reported
        self.reported_error = self.file.written.met if self.file.written is not None else None

    @property
    def attr(self):
        return self.file.attr

    @property
    def size(self) -> int:
        """The size as this client sees it now, own writes included."""
        return self.file.size


class DirHandle(NamedTuple):
    """An open directory. A listing has no other state: its cursors say where to continue."""

    inode: int
