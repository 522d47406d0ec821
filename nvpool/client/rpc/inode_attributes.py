"""Attributes, grants (access tokens) and leases of inodes, fetched from the metadata service.

Each reply's attributes and lease go to the cache. For an open inode the module also keeps the grant valid: it
fetches a new one on demand, and in the background past half its life. Used by client/vfs, and by the reader,
the writer and the chunk client for the files that they handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.background_tasks import BackgroundTasks
from nvpool.client.state.leases import InodeLease
from nvpool.client.state.metadata_cache import DIVIDED_FLAG, MetadataCache, OpenInode, typed_attr
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.errors import AccessDenied, LockLost, NotFound, Unavailable, WrongShard
from nvpool.core.grants import READ, allows
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.messages.read_write_codec import pack_inodes
from nvpool.rpc.v1 import meta_pb2, wire_pb2

PARTS_TRIES_MAX = 8
"""Attempts to read a striped directory's attributes and stripes consistently.

After these attempts the last values are used. More than one attempt is needed when the attributes change all
the time.
"""
SILENT_S = 1.0
"""Wait for the attributes of an open file before a read goes on with the cached attributes."""
RENEWALS_MAX = 64
"""Background tasks beyond which no further grant is renewed in the background."""


class InodeAttributes:
    """Fetches attributes, grants and leases, and stores them in the cache."""

    def __init__(
        self,
        meta: MetaClient,
        cache: MetadataCache,
        view: PoolView,
        options: ClientOptions,
        clock: Clock,
        tasks: BackgroundTasks,
    ) -> None:
        self._meta = meta
        self._leases = meta.leases
        self._cache = cache
        self._view = view
        self._options = options
        self._clock = clock
        self._tasks = tasks

    # -- open inodes ---------------------------------------------------------------------------------------------------

    async def refresh(self, file: OpenInode, rights: int) -> None:
        """Fetch new attributes and a grant for an open inode.

        On return the grant has `rights` besides those it had before, or `rights` alone if some of the earlier
        rights were revoked. One request at a time is in flight for a file. LockLost, AccessDenied.
        """
        wanted, rights = rights, rights | file.grant_rights
        if file.renewal is None or file.renewal.done():
            file.renewal = asyncio.create_task(self.fetch_open(file, rights))
            # the waiting caller gets the error from the await below
            file.renewal.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(file.renewal)
        except AccessDenied:
            file.give_up_grant()
            rights = wanted
        if rights & ~file.grant_rights:
            await self.fetch_open(file, rights)

    async def look(self, file: OpenInode, rights: int = 0) -> None:
        """Fetch new attributes of an open inode for a read.

        If the service does not answer within SILENT_S, the cached attributes are used; while an earlier
        request is unanswered for longer than that, they are used immediately. So an open file stays readable
        as long as its grant is valid. Without a valid grant this raises what MetaClient.ask raises.
        """
        now_s = self._clock.boottime_s()
        asked = file.looking
        if asked is None or asked.done() or file.looking_s + SILENT_S > now_s:
            asked = self._tasks.start(self.fetch_open(file, rights | file.grant_rights))
            asked.add_done_callback(_retrieve)
            if file.looking is None or file.looking.done():
                file.looking, file.looking_s = asked, now_s
            await asyncio.wait([asked], timeout=SILENT_S)
        try:
            if asked.done() or not self._may_read(file):
                await asyncio.shield(asked)
        except Unavailable:
            if not self._may_read(file):
                raise
        except AccessDenied:
            file.give_up_grant()  # perhaps only the write right was revoked
            await self.fetch_open(file, rights)

    def _may_read(self, file: OpenInode) -> bool:
        return bool(file.grant) and grants.read(file.grant).ends_ms > self._clock.wall_ns() // 1_000_000

    async def fetch_open(self, file: OpenInode, rights: int) -> None:
        """Fetch new attributes of an open inode, and a grant with exactly `rights`. LockLost, AccessDenied."""
        request = meta_pb2.GetAttrRequest(inode=file.inode, rights=rights)
        if file.lost:
            raise LockLost()
        sent_s = self._clock.boottime_s()
        entry = await self._meta.ask(file.inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        if file.lost:
            # The request found that the session was lost. Bytes written in the old session must not be sent
            # under a grant of the new session.
            raise LockLost()
        self.take(entry, file)
        self.take_lease(entry, sent_s)

    def take_lease(self, entry: meta_pb2.Entry, sent_s: float) -> InodeLease | None:
        """Record the lease in a reply, if the reply has one. `sent_s`: when the request was sent."""
        if not entry.lease_ms:
            return None
        return self._leases.take(
            entry.attr.inode, entry.lease_ms, sent_s, entry.grant if allows(entry.grant, READ) else b""
        )

    async def confirm(self, file: OpenInode) -> None:
        """Validate bytes that were read through an open which the service may not know.

        Called when no lease covers the bytes any more. Report the open, then ask for the inode: if the inode
        still exists, the bytes were the file's. NotFound: the bytes may be those of a hole.
        """
        await self._meta.report_opens(file.inode)
        await self.fetch_open(file, READ)
        file.unreported = False

    def take(self, entry: meta_pb2.Entry, file: OpenInode | None = None) -> Attr:
        """Store the attributes of a reply in the cache, and its grant if the inode is open."""
        attr = typed_attr(entry.attr)
        if attr.flags & DIVIDED_FLAG:  # these attributes lack the stripes' share
            self._cache.grow_old(attr.inode)
            return attr
        self._cache.put_attr(attr)
        if entry.grant:
            file = file or self._cache.open.get(attr.inode)
            if file is not None:
                file.adopt_grant(entry.grant, self._clock.wall_ns() // 1_000_000)
        return self._cache.newer(attr.inode, attr.change) or attr

    # -- inodes --------------------------------------------------------------------------------------------------------

    async def fetch(self, inode: int, rights: int = 0) -> Attr:
        """Fetch the attributes of an inode; for a striped directory, the sum over its stripes. NotFound."""
        request = meta_pb2.GetAttrRequest(inode=inode, rights=rights)
        sent_s = self._clock.boottime_s()
        entry = await self._meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        if entry.attr.flags & DIVIDED_FLAG:
            return await self._with_parts(entry, request, sent_s)
        attr = self.take(entry)
        self.take_lease(entry, sent_s)
        return attr

    async def _with_parts(
        self, entry: meta_pb2.Entry, request: meta_pb2.GetAttrRequest, sent_s: float
    ) -> Attr:
        """Attributes of a striped directory, summed over its stripes on all shards (meta.proto).

        The sum is of a time in which the directory's own record did not change: every change of that record
        takes the stripes into it.
        """
        inode = request.inode
        for _ in range(PARTS_TRIES_MAX):
            replies = await self.ask_all(
                wire_pb2.META_PARTS,
                meta_pb2.PartsReply,
                lambda: meta_pb2.PartsRequest(inodes=pack_inodes((inode,))),
            )
            before = entry.attr.change
            entry = await self._meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
            if not entry.attr.flags & DIVIDED_FLAG:
                return self.take(entry)
            if entry.attr.change == before:
                break
        attr = entry.attr
        parts = [part for reply in replies for part in reply.parts]
        # a single stripe may have removed more entries than are counted so far
        attr.size = max(0, attr.size + sum(part.entries for part in parts))
        attr.links = max(2, attr.links + sum(part.subdirectories for part in parts))
        for part in parts:
            attr.mtime_ns = max(attr.mtime_ns, part.mtime_ns)
            attr.ctime_ns = max(attr.ctime_ns, part.ctime_ns)
            attr.change += part.change
        attr.flags &= ~DIVIDED_FLAG
        self.take(entry)
        if not self._leases.is_news(inode, sent_s):  # this client has changed the directory since the request
            self._cache.grow_old(inode)
        return typed_attr(attr)

    async def ask_all(
        self, method: int, reply_type: type[Any], make_request: Callable[[], object]
    ) -> list[Any]:
        """The replies of all shards, without those of shards that have left the pool meanwhile."""

        async def ask(shard: int) -> Any:
            try:
                return await self._meta.ask_shard(shard, method, make_request(), reply_type)
            except WrongShard:
                if shard in self._view.map.shard_by_id:
                    raise
                return None

        replies = await asyncio.gather(*(ask(shard.id) for shard in self._view.map.shards))
        return [reply for reply in replies if reply is not None]

    async def volume_of(self, inode: int) -> int:
        """The volume of the inode, 0 for none. Attributes from a listing lack it and are fetched again."""
        attr = self._cache.attr(inode, self._options.attr_s)
        if attr is None or not attr.volume:
            attr = await self.fetch(inode)
        return attr.volume

    # -- background ----------------------------------------------------------------------------------------------------

    def renew_grants(self) -> None:
        """Renew used grants of open inodes past half their life, in the background."""
        now_ms = self._clock.wall_ns() // 1_000_000
        for file in list(self._cache.open.values()):
            if (
                file.grant_used
                and file.grant
                and file.grant_half_ms <= now_ms
                and len(self._tasks.running) < RENEWALS_MAX
            ):
                file.grant_used = False
                self._tasks.start(self._renew_quietly(file))

    async def _renew_quietly(self, file: OpenInode) -> None:
        try:
            await self.refresh(file, file.grant_rights)
        except Exception as error:
            # the next user of the file gets the error
            if not isinstance(error, NotFound):
                file.grant_used = True


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a look that has ended: a caller that waited long enough has already raised it."""
    if not task.cancelled():
        task.exception()
