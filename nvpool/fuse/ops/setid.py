"""Set-id bits and file capabilities: a change of a program's bytes removes them.

A part of `fuse/ops/operations`. The kernel removes them only if a write goes through its pages; it marks
requests of callers that may not make set-id files. The rest is done here: appends past the kernel's pages,
range operations, and requests with that mark.
"""

from __future__ import annotations

import contextlib
from typing import Any

from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.core.errors import NoAttribute
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices
from nvpool.fuse.ops.kernel_cache.pages import HAS_XATTRS
from nvpool.rpc.api import Buffer
from nvpool.rpc.messages.meta_messages import Attr

S_ISUID, S_ISGID, S_IXGRP = 0o4000, 0o2000, 0o0010
SET_IDS = S_ISUID | S_ISGID
CAPABILITY = b"security.capability"


def is_in_group(caller: Caller, gid: int) -> bool:
    """Whether `gid` is the caller's group, or a supplementary one of its process.

    False if that is unknown.
    """
    if caller.gid == gid:
        return True
    try:
        with open(f"/proc/{caller.pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Groups:"):
                    return gid in map(int, line[7:].split())
    except (OSError, ValueError):
        pass
    return False


def without_set_ids(attr: Attr, caller: Caller) -> int | None:
    """Mode bits that a regular file keeps when `caller`, without CAP_FSETID, changes its bytes; None: all.

    As `setattr_should_drop_suidgid` of Linux 6.2: the set-uid bit is removed. The set-gid bit is removed if
    the group may execute the file, and otherwise if the caller is not in the file's group.
    """
    mode = attr.mode & 0o7777
    kept = mode & ~S_ISUID
    if mode & S_ISGID and (mode & S_IXGRP or not is_in_group(caller, attr.gid)):
        kept &= ~S_ISGID
    return kept if kept != mode else None


def drops_set_gid(attr: Attr, caller: Caller) -> bool:
    """Whether the set-gid bit goes when `caller` changes owner or group of the file.

    This concerns a file whose group may not execute it. As `setattr_should_drop_sgid` of Linux: the bit stays
    if the caller is in the file's group, and for root. The metadata service removes the other set-id bits at
    each change of the owner.
    """
    return (
        attr.mode & (0o170000 | S_ISGID | S_IXGRP) == 0o100000 | S_ISGID
        and caller.uid != 0
        and not is_in_group(caller, attr.gid)
    )


class Privileges:
    """Removal of privileges from programs whose bytes change."""

    def __init__(self, vfs: Any, notices: KernelNotices) -> None:
        self._vfs = vfs
        self._notices = notices

    async def drop_set_ids(self, file: FileHandle, caller: Caller) -> None:
        """Remove the set-id bits that the file loses when `caller` changes its bytes."""
        mode = without_set_ids(file.attr, caller)
        if mode is not None:
            await self._vfs.setattr(file.inode, mode=mode, caller=Caller(0, 0))
            self._notices.invalidate_attributes(file.inode)

    async def append(self, file: FileHandle, buffer: Buffer, caller: Caller | None) -> int:
        """Append without leaving the file more privileges than a write through the kernel's pages would.

        Returns the place of the record. `caller`: None if the write goes through those pages.
        """
        place: int
        if caller is None:
            place = await self._vfs.append(file, buffer)
            return place
        await self.take(file, caller)
        place = await self._vfs.append(file, buffer)
        # another node may have set them meanwhile; the reply to the append has the current attributes
        await self.take(file, caller)
        return place

    async def take(self, file: FileHandle, caller: Caller) -> None:
        """Remove privileges from a program before bytes are written into it.

        Set-id bits are removed unless root writes (capabilities(7), CAP_FSETID; the process that opened the
        file stands for the writer). File capabilities are removed always.
        """
        if caller.uid:
            await self.drop_set_ids(file, caller)
        if file.attr.flags & HAS_XATTRS:
            with contextlib.suppress(NoAttribute):
                await self._vfs.removexattr(file.inode, CAPABILITY, caller)
