"""Listings: streamed, in bounded memory, with cursors that stay good while the directory changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.client.state.types import DirHandle
from nvpool.client.vfs.names import Names
from nvpool.core.errors import NotADirectory
from nvpool.rpc.messages.direntries import Listed
from nvpool.rpc.v1 import meta_pb2, wire_pb2

LIST_MAX = 1024
"""Entries in one answer; the service gives no more."""


class Listing(Names):
    async def opendir(self, inode: int) -> DirHandle:
        """NotFound; NotADirectory. Asks nobody where the attributes are here already."""
        attr = self.cache.attr(inode, self.options.attr_s) or await self._fetch_attr(inode)
        if attr.mode & 0o170000 != 0o040000:
            raise NotADirectory
        return DirHandle(inode)

    async def readdir(self, directory: DirHandle, cursor: int, limit: int,
                      answered: Callable[[int | None], None] | None = None) -> tuple[Listed, bool]:
        """Up to `limit` entries behind `cursor` (0 begins), with attributes, and whether there are more. An entry that is there
        during the whole listing is delivered once; '.' and '..' are not. StaleCursor for a cursor that is none.

        `answered` is called with the cursor that leads on, None at the end, as soon as that is known: a task that it makes gets
        its first turn before this one works on what has come, so that the service does not wait for us."""
        request = meta_pb2.ListDirRequest(inode=directory.inode, cursor=cursor, limit=min(limit, LIST_MAX), attrs=True,
                                          packed=True)
        listed, more, lease_ms, sent_s = await self._ask_list(request)
        if answered is not None:
            answered(listed.cursor(-1) if more and listed.names else None)
            await asyncio.sleep(0)
        self._believe_list(directory.inode, listed, lease_ms, sent_s)
        if not self.cache.open.keys().isdisjoint(listed.inodes):
            for at, inode in enumerate(listed.inodes):
                if inode in self.cache.open:
                    listed.put(at, self._merged(listed.attr(at)))
        return listed, more

    def outdated(self, inodes: list[int], since_s: float) -> set[int]:
        """Those of which an answer to a question that was asked then tells no news: we have changed them since, or were told
        that others do."""
        return self.leases.outdated(inodes, since_s)

    def unpromised(self, listed: Listed) -> set[int]:
        """Inodes whose names are not covered by a lease."""
        inodes = listed.inodes
        if not inodes or (listed.promised == len(inodes) and self.leases.held(inodes[-1]) is not None):
            return set()
        held = self.leases.held
        return {inode for at, inode in enumerate(inodes) if not listed.is_promised(at) or held(inode) is None}

    async def releasedir(self, directory: DirHandle) -> None:
        """Nothing is kept for a listing."""

    async def fsyncdir(self, inode: int) -> None:
        """Every change of names that was answered before survives the loss of power."""
        if not await self._is_spread(inode):
            await self.meta.ask(inode, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
            return
        await self.ask_all(wire_pb2.META_SYNC, meta_pb2.SyncReply, meta_pb2.SyncRequest)
