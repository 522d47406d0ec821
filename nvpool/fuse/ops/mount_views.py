"""Views of a pool: a mount of a subtree, a read-only mount, or both.

Subtree: the kernel's number for the root of a mount is 1, the same as the pool's root inode. Here 1 stands
for the mounted directory, wherever the kernel or a part of `fuse/ops/operations` uses it. So no request can
name anything above that directory, and '..' ends there. Towards the kernel, only notifications must be
translated: a reply names a directory by its inode only in a look-up in its parent, which is not in the mount.
An engine knows nothing of all this.

Read-only: the kernel itself refuses changes as long as it considers the mount read-only. Here they are
refused in any case (`mount -i -o remount,rw`), before a server is asked for a right to write.

Used by mountd/server, which finds the directory once (`directory_at`) and keeps its inode number. The mount
shows that directory as long as the mount exists, even if the directory is renamed. If it is removed, every
request that names it fails with ESTALE.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterable

from nvpool.core.errors import InvalidRequest, NotADirectory, NotFound, NotSupported, ReadOnly
from nvpool.core.ids import ROOT_INODE
from nvpool.fuse.ops.operations import DOTS, FuseOps

_BY_INODE = (
    "getattr_now",
    "getattr",
    "setattr",
    "readlink",
    "access",
    "open",
    "open_now",
    "opendir",
    "getxattr",
    "setxattr",
    "listxattr",
    "removexattr",
    "lookup_now",
    "begin_lookup",
    "mknod",
    "mkdir",
    "symlink",
    "unlink",
    "rmdir",
    "create",
    "begin_create",
    "begin_unlink",
    "has_no_xattr",
    "create_unnamed",
    "statx",
)
"""Requests whose first argument is an inode that the kernel names."""
_CHANGES = (
    "setattr",
    "mknod",
    "mkdir",
    "symlink",
    "link",
    "unlink",
    "rmdir",
    "rename",
    "create",
    "write",
    "fallocate",
    "copy_file_range",
    "setxattr",
    "removexattr",
    "create_unnamed",
)


def parts_of(path: str) -> tuple[bytes, ...]:
    """Names from the root of a pool to the directory at `path`.

    InvalidRequest: `path` contains '..', or a byte that no name can have.
    """
    parts = tuple(part for part in os.fsencode(path).split(b"/") if part not in (b"", b"."))
    if b".." in parts or any(b"\0" in part for part in parts):
        raise InvalidRequest(
            f"{path!r} is not a place to mount: write the names from the root of the pool on, without '..'"
        )
    return parts


async def directory_at(vfs, path: str) -> int:
    """The inode of the directory at `path` of the pool.

    Symbolic links are not followed: an attacker may have put them there. Raises InvalidRequest as parts_of;
    NotFound and NotADirectory, with the part of the path; and errors of the metadata service.
    """
    inode, walked = ROOT_INODE, ""
    for name in parts_of(path):
        walked += "/" + os.fsdecode(name)
        try:
            attr = await vfs.lookup(inode, name)
        except NotFound:
            raise NotFound(f"{walked} does not exist in the pool, so it cannot be mounted") from None
        if stat.S_ISLNK(attr.mode):
            raise NotADirectory(
                f"{walked} is a symbolic link, and those are not followed: mount what it leads to"
            )
        if not stat.S_ISDIR(attr.mode):
            raise NotADirectory(f"{walked} is not a directory, so it cannot be mounted")
        inode = attr.inode
    return inode


class SubtreeOps(FuseOps):
    """Operations on a subtree; see the module.

    `root` is the inode of the directory that is shown as the root.
    """

    shows_subtree = True

    def __init__(self, vfs, options=None, *, root: int) -> None:
        self.root = root
        super().__init__(vfs, options)

    def _here(self, inode: int) -> int:
        return self.root if inode == ROOT_INODE else inode

    def _there(self, inode: int) -> int:
        return ROOT_INODE if inode == self.root else inode

    async def lookup(self, parent: int, name: bytes):
        # only for exported file systems; a subtree must not be exported, because file handles know no root
        if name in DOTS:
            raise NotSupported("a subtree cannot be exported")
        return await super().lookup(self._here(parent), name)

    async def link(self, inode: int, parent: int, name: bytes, caller):
        return await super().link(self._here(inode), self._here(parent), name, caller)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller
    ) -> None:
        await super().rename(self._here(parent), name, self._here(new_parent), new_name, flags, caller)

    async def statfs(self, node: int = ROOT_INODE):
        return await super().statfs(self._here(node))

    def _above(self, attr) -> int:
        return attr.inode if attr.inode == self.root else super()._above(attr)

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        super().forget((self._here(inode), count) for inode, count in forgotten)

    # -- callbacks that an engine sets; they are called with the kernel's numbers --------------------------------------
    # -----------------------------------------

    @property
    def invalidate_attributes(self) -> Callable[[int], None]:
        return self._invalidate_attributes

    @invalidate_attributes.setter
    def invalidate_attributes(self, notify: Callable[[int], None]) -> None:
        self._invalidate_attributes = lambda inode: notify(self._there(inode))

    @property
    def invalidate(self) -> Callable[[Iterable[tuple[int, bytes]], Iterable[int]], Awaitable[None]]:
        return self._invalidate

    @invalidate.setter
    def invalidate(
        self, notify: Callable[[Iterable[tuple[int, bytes]], Iterable[int]], Awaitable[None]]
    ) -> None:
        self._invalidate = lambda names, inodes: notify(
            [(self._there(parent), name) for parent, name in names], [self._there(inode) for inode in inodes]
        )


def _named_here(name: str):
    otherwise = getattr(SubtreeOps, name)

    def method(self, inode: int, *arguments, **named):
        return otherwise(self, self._here(inode), *arguments, **named)

    method.__name__, method.__doc__ = name, otherwise.__doc__
    return method


for _name in _BY_INODE:
    setattr(SubtreeOps, _name, _named_here(_name))


class ReadOnlyOps:
    """Operations of a read-only mount: every change raises ReadOnly.

    Comes before FuseOps or SubtreeOps in the order of bases.
    """

    def open_now(self, inode: int, flags: int, caller, unique: int = 0):
        _check_only_reads(flags)
        return super().open_now(inode, flags, caller, unique)

    async def open(self, inode: int, flags: int, caller, drop_set_ids: bool = False):
        _check_only_reads(flags)
        return await super().open(inode, flags, caller, drop_set_ids)

    def write_now(self, *_) -> bool:
        raise ReadOnly(_READ_ONLY)

    def begin_create(self, *_) -> None:
        """Decline, so that `create` is called, which raises ReadOnly."""

    begin_unlink = begin_create


_READ_ONLY = "the pool is mounted read-only here"


def _check_only_reads(flags: int) -> None:
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        raise ReadOnly(_READ_ONLY)


def _refused(name: str):
    async def method(self, *_, **__):
        raise ReadOnly(_READ_ONLY)

    method.__name__, method.__doc__ = name, "Refused: see ReadOnlyOps."
    return method


for _name in _CHANGES:
    setattr(ReadOnlyOps, _name, _refused(_name))


class _ReadOnlyFuseOps(ReadOnlyOps, FuseOps):
    pass


class _ReadOnlySubtreeOps(ReadOnlyOps, SubtreeOps):
    pass


def view_of(vfs, options=None, *, root: int = ROOT_INODE, read_only: bool = False) -> FuseOps:
    """Operations on directory `root` of the pool and all below, for an engine to serve."""
    if root == ROOT_INODE:
        return (_ReadOnlyFuseOps if read_only else FuseOps)(vfs, options)
    return (_ReadOnlySubtreeOps if read_only else SubtreeOps)(vfs, options, root=root)
