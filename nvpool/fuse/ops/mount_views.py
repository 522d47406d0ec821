"""Views of a pool: a mount of a subtree, a read-only mount, or both.

Subtree: the kernel's number for the root of a mount is 1, the same as the pool's root inode. Here 1 stands
for the mounted directory, wherever the kernel or a part of `fuse/ops/operations` uses it. So no request can
name anything above that directory, and '..' ends there. Towards the kernel, only notifications must be
translated (`fuse/ops/kernel_cache/notices`): a reply names a directory by its inode only in a look-up in its
parent, which is not in the mount. An engine knows nothing of all this.

Read-only: the kernel itself refuses changes as long as it considers the mount read-only. Here they are
refused in any case (`mount -i -o remount,rw`), before a server is asked for a right to write.

`fuse/ops/operations` has a MountView for each mount, and takes each request through it. A mount of the whole
pool with all rights costs nothing for that. mountd/server finds the directory once (`directory_at`) and keeps
its inode number. The mount shows that directory as long as the mount exists, even if the directory is
renamed. If it is removed, every request that names it fails with ESTALE.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from nvpool.core.errors import InvalidRequest, NotADirectory, NotFound, ReadOnly
from nvpool.core.ids import ROOT_INODE

_READ_ONLY = "the pool is mounted read-only here"

_Request = TypeVar("_Request", bound=Callable[..., Any])
_Opening = TypeVar("_Opening", bound=Callable[..., Any])
_Change = TypeVar("_Change", bound=Callable[..., Coroutine[Any, Any, Any]])


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


async def directory_at(vfs: Any, path: str) -> int:
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


class MountView(NamedTuple):
    """Part of a pool that a mount shows, and whether it may be changed there.

    Each method returns the function of a request as this view permits it: mostly the same function.
    """

    root: int = ROOT_INODE
    """Inode of the directory that is shown as the root."""
    read_only: bool = False

    @property
    def shows_subtree(self) -> bool:
        """Whether the root of the mount is not the root of the pool."""
        return self.root != ROOT_INODE

    @property
    def is_plain(self) -> bool:
        """Whether the mount shows the whole pool, with all rights."""
        return not self.shows_subtree and not self.read_only

    def here(self, inode: int) -> int:
        """The inode that the kernel means by its number."""
        return self.root if inode == ROOT_INODE else inode

    def by_inode(self, request: _Request) -> _Request:
        """A request whose first argument is the kernel's number of an inode."""
        if not self.shows_subtree:
            return request
        root = self.root

        def translated(inode: int, *arguments: Any, **named: Any) -> Any:
            return request(root if inode == ROOT_INODE else inode, *arguments, **named)

        return cast("_Request", translated)

    def link(self, request: _Request) -> _Request:
        """A request that begins with an inode and the directory of its new name."""
        if not self.shows_subtree:
            return request

        def translated(inode: int, parent: int, *arguments: Any, **named: Any) -> Any:
            return request(self.here(inode), self.here(parent), *arguments, **named)

        return cast("_Request", translated)

    def rename(self, request: _Request) -> _Request:
        """A request that begins with a directory, a name in it, and the directory of the new name."""
        if not self.shows_subtree:
            return request

        def translated(parent: int, name: bytes, new_parent: int, *arguments: Any, **named: Any) -> Any:
            return request(self.here(parent), name, self.here(new_parent), *arguments, **named)

        return cast("_Request", translated)

    def change(self, request: _Change) -> _Change:
        """A request that changes something: with a read-only view it raises ReadOnly."""
        return cast("_Change", _refuse) if self.read_only else request

    def change_now(self, request: _Request) -> _Request:
        """As `change`, of a function that is no coroutine."""
        return cast("_Request", _refuse_now) if self.read_only else request

    def begin_change(self, request: _Request) -> _Request:
        """A request that may decline, so that a coroutine is called, which raises ReadOnly."""
        return cast("_Request", _decline) if self.read_only else request

    def opening(self, request: _Opening) -> _Opening:
        """An open: with a read-only view ReadOnly is raised, unless the file is opened only to be read."""
        if not self.read_only:
            return request

        async def checked(inode: int, flags: int, *arguments: Any, **named: Any) -> Any:
            _check_only_reads(flags)
            return await request(inode, flags, *arguments, **named)

        return cast("_Opening", checked)

    def opening_now(self, request: _Opening) -> _Opening:
        """As `opening`, of a function that is no coroutine."""
        if not self.read_only:
            return request

        def checked(inode: int, flags: int, *arguments: Any, **named: Any) -> Any:
            _check_only_reads(flags)
            return request(inode, flags, *arguments, **named)

        return cast("_Opening", checked)


def _check_only_reads(flags: int) -> None:
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        raise ReadOnly(_READ_ONLY)


async def _refuse(*_: object, **__: object) -> NoReturn:
    raise ReadOnly(_READ_ONLY)


def _refuse_now(*_: object, **__: object) -> NoReturn:
    raise ReadOnly(_READ_ONLY)


def _decline(*_: object, **__: object) -> None:
    """Nothing was begun."""
