"""Striped directories over several shards: chooses the shard of a name or listing part.

The names of a striped directory are spread over all partitions by their hashes. Each name is at the shard
that has its partition: that shard answers, and executes changes by itself. A directory that is not known to
be striped is asked for at its own shard, which says so, or executes the change together with the other shard.
A striped directory stays striped. Used by all operations on names.
"""

from __future__ import annotations

from typing import Any

from nvpool.client.state.metadata_cache import WIDE_FLAG
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import SpreadDirectory
from nvpool.core.ids import COUNTER_BITS
from nvpool.poolmap.shards.partitions import cursor_parts, partition_of_name
from nvpool.rpc.v1 import meta_pb2, wire_pb2

_WIDE_MAX = 65536


class StripedDirectories:
    """The placement of names at shards."""

    def __init__(self, parts: ClientParts) -> None:
        self._view = parts.view
        self._meta = parts.meta
        self._cache = parts.cache
        self._inodes = parts.inodes
        self._wide: dict[int, None] = {}

    async def is_spread(self, directory: int) -> bool:
        """Whether the directory's names are at several shards."""
        if len(self._view.map.shards) == 1 or self._meta.name_hash is None:
            return False
        if directory in self._wide:
            return True
        flags = self._cache.flags(directory)
        if flags is None:
            flags = (await self._inodes.fetch(directory)).flags
        if flags & WIDE_FLAG:
            self.learn_wide(directory)
        return bool(flags & WIDE_FLAG)

    def is_together(self, directory: int) -> bool:
        """Whether the directory's names are surely at its own shard. Sends no request."""
        if len(self._view.map.shards) == 1 or self._meta.name_hash is None:
            return True
        flags = self._cache.flags(directory) if directory not in self._wide else None
        return flags is not None and not flags & WIDE_FLAG

    def learn_wide(self, directory: int) -> None:
        """Record that the directory is striped, as a shard said."""
        self._wide[directory] = None
        for old in too_old(self._wide, _WIDE_MAX):
            del self._wide[old]

    def forget_wide(self) -> None:
        """Forget which directories are striped: their shards say it again."""
        self._wide.clear()

    async def place(self, parent: int, name: bytes) -> tuple[int, bool]:
        """An inode number at the shard that has the name, and `spread` for the request.

        `spread`: whether the hash of the name determines the shard.
        """
        if not await self.is_spread(parent):
            return parent, False
        return _number_at(parent, self._meta.name_hash(parent, name)), True

    def place_now(self, parent: int, name: bytes) -> tuple[int, bool] | None:
        """As `place`, from cached data alone; None if a request is needed."""
        name_hash = self._meta.name_hash
        if len(self._view.map.shards) == 1 or name_hash is None:
            return parent, False
        if parent not in self._wide:
            flags = self._cache.flags(parent)
            if flags is None:
                return None
            if not flags & WIDE_FLAG:
                return parent, False
            self.learn_wide(parent)
        return _number_at(parent, name_hash(parent, name)), True

    async def ask_name(self, method: int, request: meta_pb2.LookupRequest, reply_type: type[Any]) -> Any:
        """Send a query about the name `request.name` in `request.parent`; return the reply."""
        while True:
            place, request.spread = await self.place(request.parent, request.name)
            try:
                return await self._meta.ask(place, method, request, reply_type)
            except SpreadDirectory:
                self.learn_wide(request.parent)

    async def ask_step(self, request: meta_pb2.ListDirRequest) -> meta_pb2.ListDirReply:
        """Fetch the next entries of a listing from their shard. Only the last reply has no entries."""
        directory = request.inode
        while True:
            place, request.spread = directory, await self.is_spread(directory)
            if request.spread:
                place = _number_at(
                    directory,
                    self._meta.name_hash(directory, request.name)
                    if request.name
                    else cursor_parts(request.cursor)[0],
                )
            try:
                reply = await self._meta.ask(place, wire_pb2.META_LIST, request, meta_pb2.ListDirReply)
            except SpreadDirectory:
                self.learn_wide(directory)
                continue
            if not reply.next:
                return reply
            if reply.packed or reply.entries:
                reply.more = True
                return reply
            request.cursor, request.name = reply.next, b""


def _number_at(directory: int, name_hash: bytes) -> int:
    return partition_of_name(directory, True, name_hash) << COUNTER_BITS
