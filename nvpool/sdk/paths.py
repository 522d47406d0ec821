"""Paths of a pool: from text to inodes, symbolic links followed, and errors as Python programs know them.

A path is text or bytes with `/` between names; it begins at the pool's root whether or not it begins with `/`. Called by the
SDK's file systems. Believes directories for the client's `attr_s`; what a file's name stands for is true when it is opened.
"""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import NamedTuple

from nvpool.client.state.types import FileHandle
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    Disconnected,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotFound,
    NvpoolError,
    TooManySymlinks,
    Unreachable,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.rpc.api import Buffer
from nvpool.rpc.v1.meta_pb2 import Attr

SYMLINKS_MAX = 40
"""As Linux: who follows more is in a circle."""

Path = str | bytes | os.PathLike[str]


class Place(NamedTuple):
    """Where a path leads: the directory, the name in it (empty for the root), and what is there, if anything."""

    parent: int
    name: bytes
    attr: Attr | None


def names_of(path: Path) -> list[bytes]:
    return [name for name in name_bytes(path).split(b"/") if name and name != b"."]


def name_bytes(path: Path) -> bytes:
    """`path` as bytes. TypeError and ValueError say what is wrong with it, as open() does."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError(f"the path {path!r} has a null character in it")
    return raw


_NAMED = (NotFound, AlreadyExists, NotADirectory, IsADirectory, DirectoryNotEmpty, NameTooLong, TooManySymlinks)
"""Errors that the name of the file explains; their texts are about inode numbers, for logs."""

_ERRNO_OF_CONNECTIONS: dict[type[NvpoolError], int] = {Unreachable: errno.ECONNREFUSED, Disconnected: errno.ECONNRESET}
"""Python programs know these as ConnectionError, which a call on a mount can not return (there it is EIO)."""


def os_error(error: NvpoolError, path: Path | None = None, other: Path | None = None, *, as_said: bool = False) -> OSError:
    """The OSError for an error of nvpool: errno, message, and the paths that the caller gave.

    The message is that of the operating system where the path says the rest, else nvpool's own. `as_said`: always nvpool's.
    """
    number = _ERRNO_OF_CONNECTIONS.get(type(error), error.errno)
    text = os.strerror(number) if path is not None and not as_said and isinstance(error, _NAMED) else str(error)
    if path is None:
        return OSError(number, text)
    if other is None:
        return OSError(number, text, os.fspath(path))
    return OSError(number, text, os.fspath(path), None, os.fspath(other))


class as_os_error:  # noqa: N801 (used as a statement; a generator would add 1 µs to each read)
    """Raise errors of nvpool as OSError (FileNotFoundError and the like) of this path, with the reason as their cause."""

    __slots__ = ("_path", "_other")
    _as_said = False

    def __init__(self, path: Path | None = None, other: Path | None = None) -> None:
        self._path = path
        self._other = other

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, NvpoolError):
            raise os_error(error, self._path, self._other, as_said=self._as_said) from error


class as_told(as_os_error):  # noqa: N801
    """The same with nvpool's own message, where that names more than the path: what differs, and the remedy."""

    __slots__ = ()
    _as_said = True


async def find(vfs: Vfs, path: Path, *, follow: bool = True) -> Attr:
    """The attributes of what the path leads to. NotFound, NotADirectory, TooManySymlinks."""
    place = await locate(vfs, path, follow=follow)
    if place.attr is None:
        raise NotFound
    return place.attr


async def locate(vfs: Vfs, path: Path, *, follow: bool = True, to_open: bool = False) -> Place:
    """Where the path leads; its last name need not exist. A symbolic link there is followed unless told otherwise.
    `to_open`: what the last name stands for is true now, not only within `attr_s`. The empty path leads nowhere, as in
    POSIX: a program that lost a name does not mean the root."""
    names = names_of(path)[::-1]
    if not names and not os.fspath(path):
        raise NotFound
    above: list[int] = [ROOT_INODE]   # directories from the root to where we are
    links = 0
    while names:
        name = names.pop()
        if name == b"..":
            if len(above) > 1:
                above.pop()
            continue
        try:
            attr = await (vfs.walk if names or not to_open else vfs.look)(above[-1], name)
        except NotFound:
            if names:
                raise
            return Place(above[-1], name, None)
        if stat.S_ISLNK(attr.mode) and (names or follow):
            links += 1
            if links > SYMLINKS_MAX:
                raise TooManySymlinks
            target = await vfs.readlink(attr.inode)
            if target.startswith(b"/"):
                del above[1:]
            names += names_of(target)[::-1]
            continue
        if not names:
            return Place(above[-1], name, attr)
        if not stat.S_ISDIR(attr.mode):
            raise NotADirectory
        above.append(attr.inode)
    attr = await vfs.getattr(above[-1])
    return Place(above[-2] if len(above) > 1 else ROOT_INODE, b"", attr)


def stat_result(attr: Attr) -> os.stat_result:
    return os.stat_result((attr.mode, attr.inode, 0, attr.links, attr.uid, attr.gid, attr.size, attr.atime_ns // 10**9,
                           attr.mtime_ns // 10**9, attr.ctime_ns // 10**9),
                          {"st_atime": attr.atime_ns / 1e9, "st_mtime": attr.mtime_ns / 1e9, "st_ctime": attr.ctime_ns / 1e9,
                           "st_atime_ns": attr.atime_ns, "st_mtime_ns": attr.mtime_ns, "st_ctime_ns": attr.ctime_ns,
                           "st_blksize": 4096, "st_blocks": attr.blocks, "st_rdev": attr.rdev})


async def write_all(vfs: Vfs, handle: FileHandle, offset: int, buffer: Buffer) -> int:
    """Write all of `buffer`. One write takes as much as fits into a volume; then QuotaExceeded is raised by the next."""
    count = await vfs.write(handle, offset, buffer)
    while count < len(buffer):
        count += await vfs.write(handle, offset + count, memoryview(buffer)[count:])
    return count
