"""Search for the paths of inodes, for logs and the pool's status.

The main use is a file with damaged blocks. A file does not know its names, so this module asks the shards to
search for them (META_NAMES): first the shard of the partition in which the file was created, then the other
shards for inodes that were not found; then the parent directories up to the root. The work is in bounded
steps, and each step is a request that lets the shard serve others.

A search never delays a read or a write: callers search in a separate task, or where a person waits, with a
time limit. If daemons answer late or not at all, the paths found so far are returned. A search needs no
session and changes nothing. Used by the chunk client (through `client/vfs/client_parts`), the supervisor's status and fsck.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError
from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2

log = logging.getLogger(__name__)

INODES_A_QUESTION = 512
SEARCHES_IN_PARALLEL = 4
"""Partitions searched at the same time, so that one with very many names does not delay the others."""
STEP_S = 10.0
LOOK_S = 2.0
"""Time limit of a search for a person or a log: one to two million names. `nvpool fsck` has no time limit."""
FILES_MAX = 256
KEPT_S, FAILED_KEPT_S = 60.0, 10.0
"""How long a found path and a failed search are cached.

A path may change, so it is not trusted for long; a path that was not found is not searched for all the time.
"""
KEPT_MAX = 1024
PAUSE_S = 5.0
"""Pause between two searches for the log."""


def printable(path: bytes) -> str:
    """The path as one printable line. Other characters and bytes that are not UTF-8 become escapes."""
    text = path.decode("utf-8", "backslashreplace")
    return (
        text
        if text.isprintable()
        else "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    )


class PathFinder:
    """One search for the paths of inodes, without a cache."""

    def __init__(self, pool_map: Callable[[], PoolMap], dialer, clock: Clock):
        self._pool_map = pool_map
        self._dialer = dialer
        self._clock = clock

    async def find(self, inodes: Iterable[int], within_s: float | None = None) -> dict[int, bytes]:
        """Find one path for each inode; b"" for an inode that has no name any more.

        Inodes that were not found within `within_s`, or whose shards could not be asked, are missing from the
        result. Without `within_s` the search may look at every name of the pool.
        """
        found: dict[int, bytes] = {}
        wanted = sorted({inode for inode in inodes if _is_number(inode)})
        try:
            async with asyncio.timeout(within_s):
                for first in range(0, len(wanted), INODES_A_QUESTION):
                    await self._find(wanted[first : first + INODES_A_QUESTION], found)
        except TimeoutError:
            log.debug("%d of %d paths were found in %s s", len(found), len(wanted), within_s)
        return found

    async def _find(self, inodes: list[int], found: dict[int, bytes]) -> None:
        up: dict[int, meta_pb2.NamedInode] = {}
        births: dict[int, list[int]] = {}
        for inode in inodes:
            births.setdefault(partition_of(inode), []).append(inode)
        turns = asyncio.Semaphore(SEARCHES_IN_PARALLEL)

        async def search(some: list[int], elsewhere: bool = False) -> None:
            async with turns:
                try:
                    named = await self._names(some, found, elsewhere=elsewhere)
                    up.update(named)
                    await self._climb(named, up)
                except NvpoolError as error:
                    log.debug("the names of %d inodes were not found: %s", len(some), error)
            found.update((inode, path) for inode in some if (path := _path(inode, up)))

        await asyncio.gather(*map(search, births.values()))
        left = [inode for inode in inodes if inode not in up and inode not in found]
        if left:
            await search(left, elsewhere=True)

    async def _climb(self, named: dict[int, meta_pb2.NamedInode], up: dict[int, meta_pb2.NamedInode]) -> None:
        """Add the parent directories to `up`, as far as they can be found."""
        while named:
            below: dict[int, list[int]] = {}
            for directory, above in {one.directory: one.above for one in named.values()}.items():
                if _is_number(above) and directory != ROOT_INODE and directory not in up:
                    below.setdefault(above, []).append(directory)
            named = {}
            for above, directories in below.items():
                named |= await self._names(directories, {}, directory=above)
            up.update(named)

    async def _names(
        self, inodes: list[int], found: dict[int, bytes], *, directory: int = 0, elsewhere: bool = False
    ) -> dict[int, meta_pb2.NamedInode]:
        named: dict[int, meta_pb2.NamedInode] = {}
        left = set(inodes)
        for endpoints in self._shards(directory or inodes[0]):
            cursor, done = b"", False
            while left and not done:
                request = meta_pb2.NamesRequest(
                    inodes=read_write_codec.pack_inodes(sorted(left)),
                    directory=directory,
                    elsewhere=elsewhere,
                    cursor=cursor,
                )
                answer = await self._dialer.call(
                    endpoints,
                    wire_pb2.META_NAMES,
                    request.SerializeToString(),
                    deadline_s=self._clock.boottime_s() + STEP_S,
                )
                reply = decoded(meta_pb2.NamesReply, answer.message)
                gone = read_write_codec.unpack_inodes(reply.gone)
                found.update(dict.fromkeys(gone, b""))
                named.update((one.inode, one) for one in reply.names)
                left.difference_update(named, gone)
                cursor, done = reply.cursor, reply.done or reply.cursor <= cursor
        return named

    def _shards(self, inode: int) -> list[tuple[str, ...]]:
        """The endpoints of all shards; the owner of the inode's partition comes first."""
        pool_map = self._pool_map()
        owner = pool_map.shard_of_partition[partition_of(inode)]
        return [
            shard.endpoints
            for shard in sorted(pool_map.shards, key=lambda shard: (shard.id != owner, shard.id))
        ]


def _is_number(inode: int) -> bool:
    """Whether the number can be an inode: the numbers may come from damaged records."""
    return 0 < inode < 1 << 63


def _path(inode: int, up: dict[int, meta_pb2.NamedInode]) -> bytes:
    """The path of the inode; b"" if its chain of parents does not end at the root."""
    parts: list[bytes] = []
    while inode != ROOT_INODE:
        one = up.get(inode)
        if one is None or len(parts) >= len(up):
            return b""
        parts.append(one.name)
        inode = one.directory
    return b"/" + b"/".join(reversed(parts))


class KnownPaths:
    """Recently found paths. A caller starts a search with `look`; one search runs at a time.

    The creator of this object owns and closes it.
    """

    def __init__(self, pool_map: Callable[[], PoolMap], dialer, clock: Clock):
        self.finder = PathFinder(pool_map, dialer, clock)
        self._clock = clock
        self.known: dict[int, tuple[float, bytes | None]] = {}  # inode -> (until when, path)
        self._searching = asyncio.Lock()
        self._waiting: set[int] = set()
        self.log_task: asyncio.Task[None] | None = None

    def path(self, inode: int) -> bytes | None:
        """The path. None if it is not known, b"" if the inode has no name any more."""
        until_s, path = self.known.get(inode, (0.0, None))
        return path if until_s > self._clock.boottime_s() else None

    async def look(self, inodes: Iterable[int], within_s: float = LOOK_S) -> None:
        """Search for unknown paths of the first FILES_MAX inodes, for at most `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s), self._searching:
                now_s = self._clock.boottime_s()
                wanted = [
                    inode for inode in dict.fromkeys(inodes) if self.known.get(inode, (0.0, None))[0] <= now_s
                ]
                wanted = wanted[:FILES_MAX]
                if wanted:
                    # a shorter limit for the search, so that the paths it finds in time are cached
                    found = await self.finder.find(wanted, within_s * 0.9)
                    self._keep(wanted, found)
        except TimeoutError:
            pass  # another caller's search took the time

    def _keep(self, wanted: list[int], found: dict[int, bytes]) -> None:
        now_s = self._clock.boottime_s()
        for inode in wanted:
            self.known.pop(inode, None)
            self.known[inode] = now_s + (KEPT_S if inode in found else FAILED_KEPT_S), found.get(inode)
        while len(self.known) > KEPT_MAX:
            del self.known[next(iter(self.known))]

    # -- for logs --------------------------------------------------------------------------------------------------------

    def log_text(self, inode: int) -> str:
        """The text to log after the inode number of a damaged file: its path in brackets, or nothing.

        If the path is not known, a search starts, and another log line names the path when it is found.
        """
        if inode in self.known and self.known[inode][0] > self._clock.boottime_s():
            path = self.path(inode)
            return f" ({printable(path)})" if path else ""
        if len(self._waiting) < FILES_MAX:
            self._waiting.add(inode)
            if self.log_task is None or self.log_task.done():
                self.log_task = asyncio.get_running_loop().create_task(self._log_paths())
        return ""

    async def _log_paths(self) -> None:
        while self._waiting:
            inodes, self._waiting = sorted(self._waiting), set()
            await self.look(inodes)
            for inode in inodes:
                path = self.path(inode)
                if path:
                    log.error("inode %d, of which bytes are damaged, is %s", inode, printable(path))
                elif path is None:
                    log.error(
                        "inode %d, of which bytes are damaged, was not found among the names soon; `nvpool fsck POOL` "
                        "names the file",
                        inode,
                    )
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Stop logging paths."""
        if self.log_task is not None:
            self.log_task.cancel()
