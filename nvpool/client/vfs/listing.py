"""Directory listings: streamed, in bounded memory.

Cursors stay valid while the directory changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.client.state.metadata_cache import DIVIDED_FLAG
from nvpool.client.state.vfs_types import DirHandle
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core.errors import NotADirectory, NotFound
from nvpool.rpc.messages.direntries import DirectoryPage, packed
from nvpool.rpc.messages.read_write_codec import pack_inodes
from nvpool.rpc.v1 import meta_pb2, wire_pb2

LIST_MAX = 1024
"""Entries in one reply; the service sends no more."""


class ListingPages:
    """Fetches parts of listings with attributes and leases, and stores them in the cache."""

    def __init__(self, parts: ClientParts, stripes: StripedDirectories) -> None:
        self._view = parts.view
        self._clock = parts.clock
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._inodes = parts.inodes
        self._stripes = stripes

    async def fetch(self, request: meta_pb2.ListDirRequest) -> tuple[DirectoryPage, bool, int, float]:
        """Fetch a part of a listing.

        Returns the entries, whether more follow, the duration of the leases, and the time of the request.
        """
        sent_s = self._clock.boottime_s()
        reply = await self._stripes.ask_step(request)
        listed = DirectoryPage(reply.packed or packed(reply.entries))
        if len(self._view.map.shards) > 1 and 0 in listed.changes:
            await self._look_elsewhere(listed)
        return listed, reply.more, reply.lease_ms, sent_s

    async def _look_elsewhere(self, listed: DirectoryPage) -> None:
        """Fetch the attributes of inodes that other shards have, one request for each shard.

        Entries of inodes that are gone by now stay without attributes.
        """
        asked: dict[int, dict[int, list[int]]] = {}
        for at, inode in enumerate(listed.inodes):
            if not listed.changes[at]:  # an inode may have several names in the listing
                asked.setdefault(self._meta.shard_of(inode), {}).setdefault(inode, []).append(at)

        async def ask(places: dict[int, list[int]]) -> None:
            request = meta_pb2.GetAttrManyRequest(inodes=pack_inodes(list(places)))
            sent_s = self._clock.boottime_s()
            reply = await self._meta.ask(
                next(iter(places)), wire_pb2.META_GETATTR_MANY, request, meta_pb2.GetAttrManyReply
            )
            found = DirectoryPage(reply.packed)
            for at, inode in enumerate(found.inodes):
                attr = found.attr(at)
                if attr.flags & DIVIDED_FLAG:
                    try:
                        attr = await self._inodes.fetch(inode)
                    except NotFound:
                        continue
                    for place in places[inode]:
                        listed.put(place, attr)
                    continue
                for place in places[inode]:
                    listed.put(place, attr)
                if self._leases.is_news(inode, sent_s):
                    self._cache.put_attr(attr)
                    if found.is_promised(at):
                        self._leases.take(inode, reply.lease_ms, sent_s)

        await asyncio.gather(*map(ask, asked.values()))

    def cache_page(self, directory: int, listed: DirectoryPage, lease_ms: int, sent_s: float) -> None:
        """Cache a listing, except the inodes that this client has changed since `sent_s`."""
        inodes, promised = listed.inodes, listed.promised
        if (
            promised in (0, len(inodes))
            and 0 not in listed.changes
            and not self._leases.outdated(inodes, sent_s)
            and self._cache.put_attrs(listed)
        ):
            leases = self._leases.take_all(inodes, lease_ms if promised else 0, sent_s)
            self._cache.put_entries(directory, listed.names, inodes, sent_s, leases)
            return
        for at, inode in enumerate(inodes):
            if listed.changes[at] and self._leases.is_news(inode, sent_s):
                self._cache.put_attr(listed.attr(at))
                lease = self._leases.take(inode, lease_ms, sent_s) if listed.is_promised(at) else None
                self._cache.put_entry(directory, listed.names[at], inode, sent_s, lease)
                if (newer := self._cache.newer(inode, listed.changes[at])) is not None:
                    # written and reported since: no user of this client may see a shorter file
                    listed.put(at, newer)


class DirectoryListing:
    """The operations on directory listings."""

    def __init__(self, parts: ClientParts, stripes: StripedDirectories, pages: ListingPages) -> None:
        self._options = parts.options
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._inodes = parts.inodes
        self._unreported = parts.unreported
        self._stripes = stripes
        self._pages = pages

    async def opendir(self, inode: int) -> DirHandle:
        """Open a directory; sends no request if its attributes are cached. NotFound, NotADirectory."""
        attr = self._cache.attr(inode, self._options.attr_s) or await self._inodes.fetch(inode)
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
        listed, more, lease_ms, sent_s = await self._pages.fetch(request)
        if answered is not None:
            answered(listed.cursor(-1) if more and listed.names else None)
            await asyncio.sleep(0)
        self._pages.cache_page(directory.inode, listed, lease_ms, sent_s)
        if not self._cache.open.keys().isdisjoint(listed.inodes):
            for at, inode in enumerate(listed.inodes):
                if inode in self._cache.open:
                    listed.put(at, self._unreported.merged(listed.attr(at)))
        return listed, more

    def outdated(self, inodes: list[int], since_s: float) -> set[int]:
        """Inodes for which a reply to a request sent at `since_s` is outdated.

        This client has changed them since, or their leases were recalled for another client's change.
        """
        return self._leases.outdated(inodes, since_s)

    def unpromised(self, listed: DirectoryPage) -> set[int]:
        """Inodes of the listing whose names are not covered by a lease."""
        inodes = listed.inodes
        if not inodes or (listed.promised == len(inodes) and self._leases.held(inodes[-1]) is not None):
            return set()
        held = self._leases.held
        return {inode for at, inode in enumerate(inodes) if not listed.is_promised(at) or held(inode) is None}

    async def releasedir(self, directory: DirHandle) -> None:
        """Close a listing. A listing has no state, so there is nothing to do."""

    async def fsyncdir(self, inode: int) -> None:
        """Make all completed changes of names in the directory durable against power loss."""
        if not await self._stripes.is_spread(inode):
            await self._meta.ask(inode, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
            return
        await self._inodes.ask_all(wire_pb2.META_SYNC, meta_pb2.SyncReply, meta_pb2.SyncRequest)
