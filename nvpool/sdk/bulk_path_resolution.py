"""Bulk path resolution: one message per metadata shard for each level of directories.

The rules are those of `paths.locate`: directory entries may come from a cache up to `attr_s` old, symbolic
links are followed, and an error on one path concerns that path alone. The SDK's read_many uses this module.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterable

from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.errors import NotADirectory, NvpoolError, TooManySymlinks
from nvpool.core.ids import ROOT_INODE
from nvpool.sdk.paths import SYMLINKS_MAX, names_of

_LINKS_PER_BATCH = 64


class PathWalk:
    """Progress on one path. `names` are the names still to look up, `inode` is the directory reached so
    far."""

    __slots__ = ("above", "names", "links", "error")

    def __init__(self, names: list[bytes]) -> None:
        self.above: list[int] = [ROOT_INODE]  # directories from the root down to the current one
        self.names = names[::-1]
        self.links = 0
        self.error: NvpoolError | None = None

    @property
    def inode(self) -> int:
        return self.above[-1]

    def next_name(self) -> bytes:
        """Next name to look up in `inode`; empty at the end of the path."""
        while self.names and self.names[-1] == b"..":
            self.names.pop()
            if len(self.above) > 1:
                self.above.pop()
        return self.names[-1] if self.names and self.error is None else b""

    def take_last(self) -> bytes:
        """Remove the last name from the path and return it. Empty if there is none, or if it is `..`."""
        return self.names.pop(0) if self.names and self.names[0] != b".." else b""

    def branch(self) -> PathWalk:
        """A copy of this path that continues from the same point."""
        way = PathWalk([])
        way.above, way.names, way.links, way.error = (
            list(self.above),
            list(self.names),
            self.links,
            self.error,
        )
        return way

    def follow(self, target: bytes | NvpoolError) -> None:
        """Continue at `target`, because the current name is a symbolic link to it."""
        self.links += 1
        if self.links > SYMLINKS_MAX:
            target = TooManySymlinks()
        if isinstance(target, NvpoolError):
            self.error = target
            return
        if target.startswith(b"/"):
            del self.above[1:]
        self.names += names_of(target)[::-1]


async def walk_together(vfs: Vfs, ways: Iterable[PathWalk]) -> None:
    """Resolve all paths together. On return each one has reached its directory or has an error."""
    going = ways
    while True:
        asked: dict[tuple[int, bytes], list[PathWalk]] = {}
        for way in going:
            name = way.next_name()
            if name:
                asked.setdefault((way.inode, name), []).append(way)
        if not asked:
            return
        found = await vfs.walk_many(list(asked))
        links: dict[int, list[PathWalk]] = {}
        for some, one in zip(asked.values(), found, strict=True):
            for way in some:
                if isinstance(one, NvpoolError):
                    way.error = one
                    continue
                way.names.pop()
                inode, mode = one
                if stat.S_ISDIR(mode):
                    way.above.append(inode)
                elif stat.S_ISLNK(mode):
                    links.setdefault(inode, []).append(way)
                else:
                    way.error = NotADirectory()
        targets = await read_links(vfs, links)
        for inode, some in links.items():
            for way in some:
                way.follow(targets[inode])
        going = [way for some in asked.values() for way in some]


async def read_links(vfs: Vfs, inodes: Iterable[int]) -> dict[int, bytes | NvpoolError]:
    """Targets of these symbolic links, with one message for each link."""

    async def read(inode: int) -> bytes | NvpoolError:
        try:
            return await vfs.readlink(inode)
        except NvpoolError as error:
            return error

    found: dict[int, bytes | NvpoolError] = {}
    left = list(inodes)
    for first in range(0, len(left), _LINKS_PER_BATCH):
        some = left[first : first + _LINKS_PER_BATCH]
        found.update(zip(some, await asyncio.gather(*map(read, some)), strict=True))
    return found
