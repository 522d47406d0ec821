"""What the Vfs hands out and takes: callers, handles, marks. Known to fuse/ops/operations and sdk, which never look inside a
handle."""

from __future__ import annotations

import os
from typing import NamedTuple

from nvpool.client.read.reader import Ahead
from nvpool.client.state.attr_cache import OpenInode

NOW = "now"
"""For atime_ns and mtime_ns of setattr: the service's clock."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
XATTR_CREATE, XATTR_REPLACE, XATTR_KILL_SET_GID = 1, 2, 4
"""Of setxattr. The third: setting an access control list takes set-gid from the mode."""
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
"""Modes of fallocate(2), see linux/falloc.h; the others are not supported."""


class Caller(NamedTuple):
    """On whose behalf: owner of what is made. Rights are checked by who calls the Vfs (the kernel, for a mount). `umask` counts
    for what is made, unless the directory has a default access control list."""

    uid: int
    gid: int
    pid: int = 0
    umask: int = 0

    def masked(self, mode: int) -> int:
        """The permission bits of `mode` that the umask takes."""
        return mode & self.umask & 0o777


class StatFs(NamedTuple):
    blocks_total: int
    blocks_free: int
    blocks_available: int
    """Until the first chain is full."""
    block_bytes: int
    files_total: int
    files_free: int
    name_bytes_max: int


class FileHandle:
    """An open file. Belongs to its opener until `release`."""

    __slots__ = ("file", "inode", "flags", "readable", "writable", "append", "ahead", "closed", "number", "told")

    def __init__(self, file: OpenInode, flags: int):
        self.file = file
        self.inode = file.inode
        self.flags = flags
        mode = flags & os.O_ACCMODE
        self.readable = mode != os.O_WRONLY
        self.writable = mode != os.O_RDONLY
        self.append = bool(flags & os.O_APPEND) and self.writable
        self.ahead = Ahead()
        self.closed = False
        self.number = 0  # by which a successor of this process knows it, where there may be one
        self.told = file.written.met if file.written is not None else None  # of what could not be stored, the last

    @property
    def attr(self):
        return self.file.attr

    @property
    def size(self) -> int:
        """As this client sees it now, own writes included."""
        return self.file.size


class DirHandle(NamedTuple):
    """A listing needs no state: its cursors say where to go on."""

    inode: int
