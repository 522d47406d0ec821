"""Directory listings: streamed, in bounded memory.

Cursors stay valid while the directory changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.client.state.vfs_types import DirHandle
from nvpool.client.vfs.namespace import NamespaceOperations
from nvpool.core.errors import NotADirectory
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.v1 import meta_pb2, wire_pb2

LIST_MAX = 1024
"""Entries in one reply; the service sends no more."""


class DirectoryListing(NamespaceOperations):
    """The operations on directory listings."""

    async def opendir(self, inode: int) -> DirHandle:
        """Open a directory; sends no request if its attributes are cached. NotFound, NotADirectory."""
        attr = self.cache.attr(inode, self.options.attr_s) or await self._fetch_attr(inode)
        if attr.mode & 0o170000 != 0o040000:
            raise NotADirectory
        return DirHandle(inode)

    async def readdir(
        self,
        directory: DirHandle,
        cursor: int,
        limit: int,
        answered: Callable[[int | None], None] | None = None,
    ) -> tuple[DirectoryPage, bool]:
        """List up to `limit` entries behind `cursor`, with attributes; return them and whether more follow.

        Cursor 0 starts the listing. An entry that exists during the whole listing is delivered once; '.' and
        '..' are not delivered. StaleCursor: the cursor is not valid.

        `answered` is called with the next cursor (None at the end) as soon as it is known. A task that the
        callback starts runs before this method processes the entries, so the service does not wait for the
        client.
        """
        request = meta_pb2.ListDirRequest(
            inode=directory.inode, cursor=cursor, limit=min(limit, LIST_MAX), attrs=True, packed=True
        )
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
        """Inodes for which a reply to a request sent at `since_s` is outdated.

        This client has changed them since, or their leases were recalled for another client's change.
        """
        return self.leases.outdated(inodes, since_s)

    def unpromised(self, listed: DirectoryPage) -> set[int]:
        """Inodes of the listing whose names are not covered by a lease."""
        inodes = listed.inodes
        if not inodes or (listed.promised == len(inodes) and self.leases.held(inodes[-1]) is not None):
            return set()
        held = self.leases.held
        return {inode for at, inode in enumerate(inodes) if not listed.is_promised(at) or held(inode) is None}

    async def releasedir(self, directory: DirHandle) -> None:
        """Close a listing. A listing has no state, so there is nothing to do."""

    async def fsyncdir(self, inode: int) -> None:
        """Make all completed changes of names in the directory durable against power loss."""
        if not await self._is_spread(inode):
            await self.meta.ask(inode, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
            return
        await self.ask_all(wire_pb2.META_SYNC, meta_pb2.SyncReply, meta_pb2.SyncRequest)
