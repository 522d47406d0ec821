"""Path resolution in a pool, and the translation of nvpool errors into OSError.

A path is text or bytes with `/` between names. Paths begin at the root of the pool, with or without a leading
`/`. Directory look-ups use entries that the client cached up to `attr_s` ago. The last name of a path that is
opened is looked up afresh. The SDK's file systems use this module.
"""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import NamedTuple

from nvpool.client.state.vfs_types import FileHandle
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
from nvpool.rpc.messages.meta_messages import Attr

SYMLINKS_MAX = 40
"""Limit of Linux; a path with more symbolic links is taken for a loop."""

Path = str | bytes | os.PathLike[str]


class PathLocation(NamedTuple):
    """Result of a path look-up. The fields are the directory, the name in that (empty for the root), and the
    attributes of an existing file."""

    parent: int
    name: bytes
    attr: Attr | None


def names_of(path: Path) -> list[bytes]:
    return [name for name in name_bytes(path).split(b"/") if name and name != b"."]


def name_bytes(path: Path) -> bytes:
    """`path` as bytes. TypeError and ValueError describe what is wrong with the path, as in open()."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError(f"the path {path!r} has a null character in it")
    return raw


_NAMED = (
    NotFound,
    AlreadyExists,
    NotADirectory,
    IsADirectory,
    DirectoryNotEmpty,
    NameTooLong,
    TooManySymlinks,
)
"""Errors that the path alone explains. Their own texts contain inode numbers and are meant for logs."""

_ERRNO_OF_CONNECTIONS: dict[type[NvpoolError], int] = {
    Unreachable: errno.ECONNREFUSED,
    Disconnected: errno.ECONNRESET,
}
"""Errnos of ConnectionError. A call on a mount cannot return them; there these errors are EIO."""


def os_error(
    error: NvpoolError, path: Path | None = None, other: Path | None = None, *, as_said: bool = False
) -> OSError:
    """OSError for an nvpool error: errno, message, and the paths that the caller gave.

    The message is that of the operating system if the path explains the rest, otherwise nvpool's own.
    `as_said` always selects nvpool's own message.
    """
    number = _ERRNO_OF_CONNECTIONS.get(type(error), error.errno)
    text = (
        os.strerror(number) if path is not None and not as_said and isinstance(error, _NAMED) else str(error)
    )
    if path is None:
        return OSError(number, text)
    if other is None:
        return OSError(number, text, os.fspath(path))
    return OSError(number, text, os.fspath(path), None, os.fspath(other))


class as_os_error:  # noqa: N801 (used as a statement; a generator would add 1 µs to each read)
    """Context manager that raises nvpool errors as OSError of this path. For example NotFound becomes
    FileNotFoundError; the cause is the original error."""

    __slots__ = ("_path", "_other")
    _as_said = False

    def __init__(self, path: Path | None = None, other: Path | None = None) -> None:
        self._path = path
        self._other = other

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, NvpoolError):
            raise os_error(error, self._path, self._other, as_said=self._as_said) from error


class as_detailed_os_error(as_os_error):  # noqa: N801
    """Variant of `as_os_error` that always uses nvpool's own message. That text names the difference and
    the remedy."""

    __slots__ = ()
    _as_said = True


async def find(vfs: Vfs, path: Path, *, follow: bool = True) -> Attr:
    """Attributes of the file at the path. Errors: NotFound, NotADirectory, TooManySymlinks."""
    place = await locate(vfs, path, follow=follow)
    if place.attr is None:
        raise NotFound
    return place.attr


async def locate(vfs: Vfs, path: Path, *, follow: bool = True, to_open: bool = False) -> PathLocation:
    """Resolve a path; its last name need not exist.

    A symbolic link at the last name is followed unless `follow` is false. `to_open`: look up the last name
    afresh instead of using an entry that the client cached up to `attr_s` ago. NotFound for the empty path,
    as in POSIX: a program that lost a name does not mean the root.
    """
    names = names_of(path)[::-1]
    if not names and not os.fspath(path):
        raise NotFound
    above: list[int] = [ROOT_INODE]  # directories from the root down to the current one
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
            return PathLocation(above[-1], name, None)
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
            return PathLocation(above[-1], name, attr)
        if not stat.S_ISDIR(attr.mode):
            raise NotADirectory
        above.append(attr.inode)
    attr = await vfs.getattr(above[-1])
    return PathLocation(above[-2] if len(above) > 1 else ROOT_INODE, b"", attr)


def stat_result(attr: Attr) -> os.stat_result:
    return os.stat_result(
        (
            attr.mode,
            attr.inode,
            0,
            attr.links,
            attr.uid,
            attr.gid,
            attr.size,
            attr.atime_ns // 10**9,
            attr.mtime_ns // 10**9,
            attr.ctime_ns // 10**9,
        ),
        {
            "st_atime": attr.atime_ns / 1e9,
            "st_mtime": attr.mtime_ns / 1e9,
            "st_ctime": attr.ctime_ns / 1e9,
            "st_atime_ns": attr.atime_ns,
            "st_mtime_ns": attr.mtime_ns,
            "st_ctime_ns": attr.ctime_ns,
            "st_blksize": 4096,
            "st_blocks": attr.blocks,
            "st_rdev": attr.rdev,
        },
    )


async def write_all(vfs: Vfs, handle: FileHandle, offset: int, buffer: Buffer) -> int:
    """Write all of `buffer`. If the volume is nearly full, one write takes the bytes that fit and the next
    one raises QuotaExceeded."""
    count = await vfs.write(handle, offset, buffer)
    while count < len(buffer):
        count += await vfs.write(handle, offset + count, memoryview(buffer)[count:])
    return count
