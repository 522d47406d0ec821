"""Listings: streamed, in bounded memory, with cursors that stay good while the directory changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.base.errors import NotADirectory
from nvpool.client.vfs.contract import DirHandle
from nvpool.client.vfs.names import Names
from nvpool.wire.v1 import meta_pb2, wire_pb2
from nvpool.wire.v1.meta_pb2 import DirEntry

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
                      answered: Callable[[int | None], None] | None = None) -> tuple[list[DirEntry], bool]:
        """Up to `limit` entries behind `cursor` (0 begins), with attributes, and whether there are more. An entry that is there
        during the whole listing is delivered once; '.' and '..' are not. StaleCursor for a cursor that is none.

        `answered` is called with the cursor that leads on, None at the end, as soon as that is known: a task that it makes gets
        its first turn before this one works on what has come, so that the service does not wait for us."""
        request = meta_pb2.ListDirRequest(inode=directory.inode, cursor=cursor, limit=min(limit, LIST_MAX), attrs=True)
        reply, sent_s = await self._ask_list(directory.inode, request)
        if answered is not None:
            answered(reply.entries[-1].cursor if reply.more and reply.entries else None)
            await asyncio.sleep(0)
        entries = self._believe_list(directory.inode, reply, sent_s)
        for entry in entries:
            if entry.HasField("attr"):
                merged = self._merged(entry.attr)
                if merged is not entry.attr:
                    entry.attr.CopyFrom(merged)
        return entries, reply.more

    async def releasedir(self, directory: DirHandle) -> None:
        """Nothing is kept for a listing."""

    async def fsyncdir(self, inode: int) -> None:
        """Every change of names that was answered before survives the loss of power."""
        await self.meta.ask(inode, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
