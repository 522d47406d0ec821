"""Base class of all Vfs operations: makes the client's parts and connects them.

`VfsBase` owns the parts, the attributes and grants (access tokens) of open inodes, and the background work. The
other modules of this package add the operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from nvpool.client.data.chunk_client import ChunkClient
from nvpool.client.data.chunk_ranges import ExtentClient
from nvpool.client.data.short_circuit import ShortCircuitReads
from nvpool.client.data.volume_key_cache import VolumeKeys
from nvpool.client.inode_paths import KnownPaths
from nvpool.client.read.batch import ReadBatcher
from nvpool.client.read.reader import Reader
from nvpool.client.rpc.change_fast_path import OnEnd, SubmittedChange
from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.leases import InodeLease
from nvpool.client.state.metadata_cache import DIVIDED_FLAG, MetadataCache, OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.client.state.vfs_types import Caller
from nvpool.client.write.crash_journal import CrashJournal
from nvpool.client.write.fast_writes import plain_writes
from nvpool.client.write.quota_reservations import QuotaReservations
from nvpool.client.write.writeback import Writer
from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.errors import AccessDenied, LockLost, NotFound, Unavailable, WrongShard
from nvpool.core.grants import READ, allows
from nvpool.rpc.messages.read_write_codec import pack_inodes
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.rpc.v1.meta_pb2 import Attr
from nvpool.shm.mount_state import KeptMemory

PARTS_TRIES_MAX = 8
"""Attempts to read a striped directory's attributes and stripes consistently.

After these attempts the last values are used. More than one attempt is needed when the attributes change all
the time.
"""
SILENT_S = 1.0
"""Wait for the attributes of an open file before a read goes on with the cached attributes."""


class VfsBase:
    """The parts of a client and their owner. The session calls `run_once` every half second."""

    def __init__(
        self,
        view: PoolView,
        dialer,
        options: ClientOptions,
        clock: Clock,
        *,
        name: str,
        kept: KeptMemory | None = None,
        squashes_root: bool = False,
    ):
        self.kept = kept
        self.options = options
        self.view = view
        self.clock = clock
        self.meta = MetaClient(view, dialer, options, clock, name=name, kept=kept)
        self.leases = self.meta.leases
        self.squashes_root = squashes_root
        """Whether root of this machine counts as nobody.

        Only the service knows what such a root may open, so the client sends each of its opens to the
        service.
        """
        self.cache = MetadataCache(options, clock, self.leases)
        self.meta.ended = self._leases_ended
        self.meta.on_opens_reported = self._opens_reported
        keys = VolumeKeys(self.meta, self._volume_of)
        self.chunks = ChunkClient(view, dialer, options, clock, renew=self._refresh, keys=keys)
        self.chunks.map_changed_files = self._forget_lanes
        self.paths = KnownPaths(lambda: view.map, dialer, clock)
        self.chunks.path_text = self.paths.log_text
        self.cache.on_change = self.chunks.short.forget
        self.keeping = CrashJournal(kept) if kept is not None else None
        self.writer = Writer(
            self.chunks,
            options,
            clock,
            refresh=self._refresh,
            report=self._report,
            begin_report=self._begin_report,
            keeping=self.keeping,
        )
        self.cache.on_cut = self.writer.was_cut
        batches = ReadBatcher(self.chunks, dialer, options, clock)
        self.reader = Reader(
            self.chunks, batches, self.writer, options, clock, self.leases, refresh=self._look
        )
        self.writer.plain = plain_writes(self)
        self.ranges = ExtentClient(self.chunks, dialer, clock)
        self.rooms = QuotaReservations(self.meta, clock)
        view.changed.append(self.rooms.map_changed)
        self.meta.on_restart = self._shard_restarted
        self._renewals: set[asyncio.Task] = set()
        self.on_lost: Callable[[int], None] = lambda inode: None
        """Called when the locks on an open inode are lost. Must not wait.

        Set by a front end that caches file bytes beyond a call: the front end must not show cached bytes of
        this inode any more.
        """
        self.on_recall: Callable[[list[int]], Awaitable[None]] = _nothing
        """Called with inodes whose leases have ended because other clients are about to change them.

        Set by a front end that caches attributes or names beyond a call. The other clients make their changes
        when this callback returns, so the callback must return soon.
        """
        self.on_reported: Callable[[int, int], None] = lambda inode, change: None
        """Called with an inode and its change number after the client has reported its own writes.

        Set by the same front end. If the change number has grown by more than one, other clients have changed
        the inode too.
        """

    @property
    def on_unleased(self) -> Callable[[], None]:
        """Called when a shard's leases end all together, without a recall for each inode. Must not wait.

        Set by a front end that caches attributes or names beyond a call.
        """
        return self.leases.on_end_all

    @on_unleased.setter
    def on_unleased(self, callback: Callable[[], None]) -> None:
        self.leases.on_end_all = callback

    def _shard_restarted(self, shard: int) -> None:
        self.cache.reset_inodes(lambda inode: self.meta.shard_of(inode) == shard)
        self.rooms.shard_restarted(shard)

    @property
    def short_circuit(self) -> ShortCircuitReads:
        return self.chunks.short

    def hold_reads(self) -> None:
        """Batch the reads that begin before `send_reads`: one message per target.

        The caller calls both in the same event-loop iteration.
        """
        self.chunks.hold()

    def send_reads(self) -> None:
        self.chunks.send_held()

    def _forget_lanes(self) -> None:
        for file in self.cache.open.values():
            file.lanes.clear()
            self.chunks.short.forget(file)

    # -- attributes and grants of open inodes --------------------------------------------------------------------------

    async def _refresh(self, file: OpenInode, rights: int) -> None:
        """Fetch new attributes and a grant for an open inode.

        On return the grant has `rights` besides those it had before, or `rights` alone if some of the earlier
        rights were revoked. One request at a time is in flight for a file. LockLost, AccessDenied.
        """
        wanted, rights = rights, rights | file.grant_rights
        if file.renewal is None or file.renewal.done():
            file.renewal = asyncio.create_task(self._ask_attr(file, rights))
            # the waiting caller gets the error from the await below
            file.renewal.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(file.renewal)
        except AccessDenied:
            file.give_up_grant()
            rights = wanted
        if rights & ~file.grant_rights:
            await self._ask_attr(file, rights)

    async def _look(self, file: OpenInode, rights: int = 0) -> None:
        """Fetch new attributes of an open inode for a read.

        If the service does not answer within SILENT_S, the cached attributes are used; while an earlier
        request is unanswered for longer than that, they are used immediately. So an open file stays readable
        as long as its grant is valid. Without a valid grant this raises what MetaClient.ask raises.
        """
        now_s = self.clock.boottime_s()
        asked = file.looking
        if asked is None or asked.done() or file.looking_s + SILENT_S > now_s:
            asked = asyncio.create_task(self._ask_attr(file, rights | file.grant_rights))
            self._renewals.add(asked)
            asked.add_done_callback(self._looked)
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
            await self._ask_attr(file, rights)

    def _looked(self, task: asyncio.Task) -> None:
        self._renewals.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here: a caller that waited long enough has already raised it

    def _may_read(self, file: OpenInode) -> bool:
        return bool(file.grant) and grants.read(file.grant).ends_ms > self.clock.wall_ns() // 1_000_000

    async def _ask_attr(self, file: OpenInode, rights: int) -> None:
        request = meta_pb2.GetAttrRequest(inode=file.inode, rights=rights)
        if file.lost:
            raise LockLost()
        sent_s = self.clock.boottime_s()
        entry = await self.meta.ask(file.inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        if file.lost:
            # The request found that the session was lost. Bytes written in the old session must not be sent
            # under a grant of the new session.
            raise LockLost()
        self._take(entry, file)
        self._leased(entry, sent_s)

    def _leased(self, entry, sent_s: float) -> InodeLease | None:
        """Record the lease in a reply, if the reply has one. `sent_s`: when the request was sent."""
        if not entry.lease_ms:
            return None
        return self.leases.take(
            entry.attr.inode, entry.lease_ms, sent_s, entry.grant if allows(entry.grant, READ) else b""
        )

    async def _leases_ended(self, inodes: list[int]) -> None:
        for inode in inodes:
            self.cache.grow_old(inode)
            file = self.cache.open.get(inode)
            if file is not None:
                self.reader.changed(file)
            else:
                self.reader.forget_content(inode)
        await self.on_recall(inodes)

    def lease_until_s(self, inode: int) -> float:
        """When the client's lease on the inode ends (boottime_s of the clock); 0 without a lease.

        Until then the service notifies this client before another client changes the inode.
        """
        lease = self.leases.held(inode)
        return lease.until_s if lease is not None else 0.0

    def is_open(self, inode: int) -> bool:
        return inode in self.cache.open

    def size_here(self, inode: int) -> int | None:
        """The known size of a file that is open on this client. None if the file is not open."""
        file = self.cache.open.get(inode)
        return None if file is None else file.size

    def _opens_reported(self, inodes: list[int]) -> None:
        for inode in inodes:
            file = self.cache.open.get(inode)
            # Without a lease the shard may have registered the open too late; the next reader must
            # revalidate.
            if file is not None and self.leases.keeps_bytes(inode):
                file.unreported = False

    async def _confirm(self, file: OpenInode) -> None:
        """Validate bytes that were read through an open which the service may not know.

        Called when no lease covers the bytes any more. Report the open, then ask for the inode: if the inode
        still exists, the bytes were the file's. NotFound: the bytes may be those of a hole.
        """
        await self.meta.report_opens(file.inode)
        await self._ask_attr(file, READ)
        file.unreported = False

    def _take(self, entry, file: OpenInode | None = None) -> Attr:
        """Store the attributes of a reply in the cache, and its grant if the inode is open."""
        attr = entry.attr
        if attr.flags & DIVIDED_FLAG:  # these attributes lack the stripes' share
            self.cache.grow_old(attr.inode)
            return attr
        self.cache.put_attr(attr)
        if entry.grant:
            file = file or self.cache.open.get(attr.inode)
            if file is not None:
                file.adopt_grant(entry.grant, self.clock.wall_ns() // 1_000_000)
        return self.cache.newer(attr.inode, attr.change) or attr

    async def _report(
        self, file: OpenInode, end: int, stored: int, wrote: bool, sync: bool, withdrawn: int = 0
    ) -> None:
        request = meta_pb2.ReportRequest(
            inode=file.inode,
            cut=file.cut,
            end=end,
            wrote=wrote,
            sync=sync,
            blocks_delta=(stored + 511) // 512,
            withdrawn=withdrawn,
        )
        self._reported(
            file,
            wrote,
            await self.meta.change(file.inode, wire_pb2.META_REPORT, request, meta_pb2.AttrReply, file=file),
        )

    def _begin_report(
        self, file: OpenInode, end: int, stored: int, wrote: bool, on_end: OnEnd
    ) -> SubmittedChange | None:
        return self.meta.begin(
            file.inode,
            wire_pb2.META_REPORT,
            self.report_request(file, file.cut, end, stored, wrote),
            meta_pb2.AttrReply,
            partial(self._begun_reported, file, wrote, on_end),
            file=file,
        )

    @staticmethod
    def report_request(
        file: OpenInode, cut: int, end: int, stored: int, wrote: bool
    ) -> meta_pb2.ReportRequest:
        return meta_pb2.ReportRequest(
            inode=file.inode, cut=cut, end=end, wrote=wrote, blocks_delta=(stored + 511) // 512
        )

    def _begun_reported(
        self, file: OpenInode, wrote: bool, on_end: OnEnd, reply, error: BaseException | None
    ) -> None:
        on_end(None, error)
        if error is None:
            self._reported(file, wrote, reply)

    def _reported(self, file: OpenInode, wrote: bool, reply) -> None:
        if reply.HasField("attr"):
            self.cache.put_attr(reply.attr, ours=True)
            if wrote:
                self.on_reported(file.inode, reply.attr.change)
        else:
            self.cache.forget_attr(file.inode)

    async def _settle(self, inode: int) -> None:
        """Report this client's writes to the inode before its attributes are read.

        The service sets the time of a write, and that time must not change again when the file is closed.
        """
        file = self.cache.open.get(inode)
        if file is not None and file.written is not None and file.written.unsettled:
            await self.writer.store(file)
            await self.writer.settle(file)

    def _merged(self, attr: Attr) -> Attr:
        """`attr` with this client's unreported writes added. The caller must not modify the result."""
        file = self.cache.open.get(attr.inode)
        if file is None or file.written is None or file.written.end <= attr.size:
            return attr
        seen = Attr()
        seen.CopyFrom(attr)
        seen.size = file.written.end
        seen.blocks = max(attr.blocks, (seen.size + 511) // 512)
        return seen

    async def _fetch_attr(self, inode: int, rights: int = 0) -> Attr:
        request = meta_pb2.GetAttrRequest(inode=inode, rights=rights)
        sent_s = self.clock.boottime_s()
        entry = await self.meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        if entry.attr.flags & DIVIDED_FLAG:
            return await self._with_parts(entry, request, sent_s)
        attr = self._take(entry)
        self._leased(entry, sent_s)
        return attr

    async def _with_parts(self, entry, request: meta_pb2.GetAttrRequest, sent_s: float) -> Attr:
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
            entry = await self.meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
            if not entry.attr.flags & DIVIDED_FLAG:
                return self._take(entry)
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
        self._take(entry)
        if not self.leases.is_news(inode, sent_s):  # this client has changed the directory since the request
            self.cache.grow_old(inode)
        return attr

    async def ask_all(self, method: int, reply_type, make_request: Callable[[], object]) -> list:
        """The replies of all shards, without those of shards that have left the pool meanwhile."""

        async def ask(shard: int):
            try:
                return await self.meta.ask_shard(shard, method, make_request(), reply_type)
            except WrongShard:
                if shard in self.view.map.shard_by_id:
                    raise
                return None

        replies = await asyncio.gather(*(ask(shard.id) for shard in self.view.map.shards))
        return [reply for reply in replies if reply is not None]

    async def _growing(self, file: OpenInode, change: Callable[[], Awaitable]):
        """Await `change`, which may make an open file longer; see QuotaReservations.repeat for retries with quotas."""
        if not file.volume:
            return await change()
        return await self.rooms.repeat(file, file.volume, change, lambda: self.writer.settle(file))

    async def _change(
        self, inode: int, method: int, request, reply_type, caller: Caller, file: OpenInode | None = None
    ):
        return await self.meta.change(
            inode, method, request, reply_type, uid=caller.uid, gid=caller.gid, file=file, once=True
        )

    # -- background ----------------------------------------------------------------------------------------------------

    async def run_once(self) -> None:
        """Send and report data that has waited long enough. Renew used grants past half their life."""
        await self.writer.run_once()
        self.chunks.short.run_once()
        self.rooms.run_once()
        if self.kept is not None:
            self.kept.trim()
        now_ms = self.clock.wall_ns() // 1_000_000
        for file in list(self.cache.open.values()):
            if file.grant_used and file.grant and file.grant_half_ms <= now_ms and len(self._renewals) < 64:
                file.grant_used = False
                task = asyncio.create_task(self._renew_quietly(file))
                self._renewals.add(task)
                task.add_done_callback(self._renewals.discard)

    async def _renew_quietly(self, file: OpenInode) -> None:
        try:
            await self._refresh(file, file.grant_rights)
        except Exception as error:
            # the next user of the file gets the error
            if not isinstance(error, NotFound):
                file.grant_used = True

    async def close(self, deadline_s: float) -> None:
        """Store and report all written data, end the session and stop the parts, all by `deadline_s`."""
        sent = await self.writer.close(deadline_s)
        self.rooms.close()
        for task in list(self._renewals):
            task.cancel()
        self.paths.close()
        await self.chunks.close()
        # Bytes in flight may still arrive at stores: so locks must not pass on before our grants end.
        await self.meta.close(min(deadline_s, self.clock.boottime_s() + 2.0), say_so=sent)


async def _nothing(inodes: list[int]) -> None:
    """Default recall callback: nothing is cached, so there is nothing to drop."""
