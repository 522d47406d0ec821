"""What a change of a program's bytes takes from it: set-id bits and file capabilities; a part of `fuse/ops/operations`.

The kernel takes them only where a write goes through its pages, and marks requests of who may not make set-id files. What it
leaves, appends past its pages, ranges and what it has marked, is done here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from nvpool.client.state.types import Caller
from nvpool.core.errors import NoAttribute
from nvpool.fuse.ops.kernel_cache import HAS_XATTRS

S_ISUID, S_ISGID, S_IXGRP = 0o4000, 0o2000, 0o0010
SET_IDS = S_ISUID | S_ISGID
CAPABILITY = b"security.capability"


def is_in_group(caller: Caller, gid: int) -> bool:
    """Whether `gid` is the caller's group, or a supplementary one of its process. False where that cannot be seen."""
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


def without_set_ids(attr, caller: Caller) -> int | None:
    """The permissions that a regular file keeps when `caller`, without CAP_FSETID, changes its bytes; None: all of them.

    As `setattr_should_drop_suidgid` of Linux 6.2: set-uid goes; set-gid goes where the group may execute the file, and else
    where the caller is not in the file's group.
    """
    mode = attr.mode & 0o7777
    kept = mode & ~S_ISUID
    if mode & S_ISGID and (mode & S_IXGRP or not is_in_group(caller, attr.gid)):
        kept &= ~S_ISGID
    return kept if kept != mode else None


def drops_set_gid(attr, caller: Caller) -> bool:
    """Whether set-gid goes when `caller` changes the owner or group of a file whose group may not execute it.

    As `setattr_should_drop_sgid` of Linux: it stays for who is in the file's group, and for root. The other set-id bits go
    whoever changes the owner, by the metadata service.
    """
    return (attr.mode & (0o170000 | S_ISGID | S_IXGRP) == 0o100000 | S_ISGID and caller.uid != 0
            and not is_in_group(caller, attr.gid))


class PrivilegeOps:
    _vfs: Any
    invalidate_attributes: Callable[[int], None]

    async def _drop_set_ids(self, file, caller: Caller) -> None:
        mode = without_set_ids(file.attr, caller)
        if mode is not None:
            await self._vfs.setattr(file.inode, mode=mode, caller=Caller(0, 0))
            self.invalidate_attributes(file.inode)

    async def _append(self, file, buffer, caller: Caller | None) -> int:
        """The place of a write at the end that leaves the file no more privileges than one through the kernel's pages does.
        `caller`: None where it goes through them."""
        if caller is None:
            return await self._vfs.append(file, buffer)
        await self._take_privileges(file, caller)
        place = await self._vfs.append(file, buffer)
        await self._take_privileges(file, caller)  # given on another node: the answer that told the place told of them too
        return place

    async def _take_privileges(self, file, caller: Caller) -> None:
        """Before bytes of somebody are in a program: set-id bits go unless root writes (capabilities(7), CAP_FSETID; who opened
        stands for who writes), file capabilities always."""
        if caller.uid:
            await self._drop_set_ids(file, caller)
        if file.attr.flags & HAS_XATTRS:
            with contextlib.suppress(NoAttribute):
                await self._vfs.removexattr(file.inode, CAPABILITY, caller)
