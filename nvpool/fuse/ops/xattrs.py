"""Extended attributes and access control lists: a part of `fuse/ops/operations`.

If agreed with the engine (`keeps_acls`), the kernel enforces access control lists. It drops them with an
inode's attributes, and queries them when a user other than the owner needs a right. The commonest answer is
that there is none, so that answer comes from the cached attributes of the inode.
"""

from __future__ import annotations

from typing import Any

from nvpool.client.state.metadata_cache import ACL_FLAG
from nvpool.client.state.vfs_types import XATTR_KILL_SET_GID, Caller
from nvpool.core.errors import NoAttribute, NotSupported
from nvpool.core.posix import acl
from nvpool.fuse.ops.kernel_cache.options import ChangeCount
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.setid import CAPABILITY, is_in_group

_SYSTEM = b"system."


class ExtendedAttributes:
    """Requests for extended attributes of one mount."""

    def __init__(self, vfs: Any, changes: ChangeCount, pages: CachedPages) -> None:
        self._vfs = vfs
        self._changes = changes
        self._seen = pages.seen
        self.keeps_acls = False
        """Whether the kernel enforces access control lists."""

    def has_no_xattr(self, inode: int, name: bytes) -> bool:
        """Whether the inode is known to lack `name`, without a query.

        Answers for the two that are queried most: file capabilities, which the kernel checks before each
        write, and access control lists.
        """
        if name == CAPABILITY:
            seen = self._seen.get(inode)
            return seen is not None and seen[1]
        if name in acl.NAMES and self.keeps_acls:
            attr = self._vfs.getattr_now(inode)
            return attr is not None and not attr.flags & ACL_FLAG
        return False

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the attribute. Raises NoAttribute."""
        if self.has_no_xattr(inode, name):
            raise NoAttribute()
        value: bytes
        if not name.startswith(_SYSTEM):
            value = await self._vfs.getxattr(inode, name)
            return value
        self._check_system(name)
        try:
            value = await self._vfs.getxattr(inode, name)
            return value
        # by an older metadata service; else the kernel would deny access to all but the owner
        except NotSupported:
            raise NoAttribute() from None

    def _check_system(self, name: bytes) -> None:
        if not self.keeps_acls or name not in acl.NAMES:
            raise NotSupported("an access control list that nobody enforces is not kept")

    async def setxattr(
        self,
        inode: int,
        name: bytes,
        value: bytes,
        flags: int,
        caller: Caller,
        kill_set_gid: bool | None = None,
    ) -> None:
        """Set an attribute.

        `kill_set_gid`: an access control list removes the set-gid bit; None: the caller's groups decide that.
        """
        if name.startswith(_SYSTEM):
            self._check_system(name)
            if kill_set_gid is None and name == acl.ACCESS and caller.uid:
                kill_set_gid = not is_in_group(caller, (await self._vfs.getattr(inode)).gid)
            if kill_set_gid:
                flags |= XATTR_KILL_SET_GID
        self._seen.pop(inode, None)
        try:
            await self._vfs.setxattr(inode, name, value, flags, caller)
        finally:
            self._changes.count += 1

    async def listxattr(self, inode: int) -> list[bytes]:
        """Return the names of all attributes."""
        names: list[bytes] = await self._vfs.listxattr(inode)
        return names if self.keeps_acls else [name for name in names if not name.startswith(_SYSTEM)]

    async def removexattr(self, inode: int, name: bytes, caller: Caller) -> None:
        """Remove an attribute. Removing an absent access control list succeeds, as on local file systems."""
        if name.startswith(_SYSTEM):
            self._check_system(name)
        try:
            await self._vfs.removexattr(inode, name, caller)
        except NoAttribute:
            if not name.startswith(_SYSTEM):
                raise
        finally:
            self._changes.count += 1
