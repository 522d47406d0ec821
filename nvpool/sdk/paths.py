"""Paths of a pool: from text to inodes, symbolic links followed, and errors as Python programs know them.

A path is text or bytes with `/` between names; it begins at the pool's root whether or not it begins with `/`. Called by the
SDK's file systems. Believes directories for the client's `attr_s`; what a file's name stands for is true when it is opened.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from nvpool.base.errors import NotADirectory, NotFound, NvpoolError, TooManySymlinks
from nvpool.base.ids import ROOT_INODE
from nvpool.client.vfs import FileHandle, Vfs
from nvpool.wire.v1.meta_pb2 import Attr

SYMLINKS_MAX = 40
"""As Linux: who follows more is in a circle."""

Path = str | bytes | os.PathLike


class Place(NamedTuple):
    """Where a path leads: the directory, the name in it (empty for the root), and what is there, if anything."""

    parent: int
    name: bytes
    attr: Attr | None


def names_of(path: Path) -> list[bytes]:
    return [name for name in os.fsencode(path).split(b"/") if name and name != b"."]


class as_os_error:  # noqa: N801 (used as a statement; a generator would add 1 µs to each read)
    """nvpool's errors leave as OSError (FileNotFoundError and its like), with the reason as their cause."""

    __slots__ = ("_path",)

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, NvpoolError):
            if self._path is None:
                raise OSError(error.errno, str(error)) from error
            raise OSError(error.errno, str(error), os.fspath(self._path)) from error


async def find(vfs: Vfs, path: Path, *, follow: bool = True) -> Attr:
    """The attributes of what the path leads to. NotFound, NotADirectory, TooManySymlinks."""
    place = await locate(vfs, path, follow=follow)
    if place.attr is None:
        raise NotFound
    return place.attr


async def locate(vfs: Vfs, path: Path, *, follow: bool = True, to_open: bool = False) -> Place:
    """Where the path leads; its last name need not exist. A symbolic link there is followed unless told otherwise.
    `to_open`: what the last name stands for is true now, not only within `attr_s`."""
    names = names_of(path)[::-1]
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


async def write_all(vfs: Vfs, handle: FileHandle, offset: int, buffer) -> int:
    """Write all of `buffer`. One write takes as much as fits into a volume; then QuotaExceeded is raised by the next."""
    count = await vfs.write(handle, offset, buffer)
    while count < len(buffer):
        count += await vfs.write(handle, offset + count, memoryview(buffer)[count:])
    return count
