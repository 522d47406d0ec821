"""Parts of a client that the operations of its file system share: metadata, data, caches and their wiring.

`ClientParts` makes these parts, connects them, runs their background work and closes them. Each class of
operations in this package receives it and keeps the parts that it uses. Made by vfs/filesystem.
"""

from __future__ import annotations

from nvpool.client.data.chunk_client import ChunkClient
from nvpool.client.data.chunk_ranges import ExtentClient
from nvpool.client.data.volume_key_cache import VolumeKeys
from nvpool.client.inode_paths import KnownPaths
from nvpool.client.read.batch import ReadBatcher
from nvpool.client.read.reader import Reader
from nvpool.client.rpc.inode_attributes import InodeAttributes
from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.background_tasks import BackgroundTasks
from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.metadata_cache import MetadataCache
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.client.state.vfs_types import FrontEndCallbacks
from nvpool.client.write.crash_journal import CrashJournal
from nvpool.client.write.late_closes import LateCloses
from nvpool.client.write.quota_reservations import QuotaReservations
from nvpool.client.write.write_reports import UnreportedWrites, WriteReports
from nvpool.client.write.writeback import Writer
from nvpool.core.clock import Clock
from nvpool.rpc.connection_pool import Dialer
from nvpool.shm.mount_state import KeptMemory


class ClientParts:
    """The shared parts of one client. `kept`: the mount state, or None."""

    def __init__(
        self,
        view: PoolView,
        dialer: Dialer,
        options: ClientOptions,
        clock: Clock,
        *,
        name: str,
        kept: KeptMemory | None,
        squashes_root: bool,
    ) -> None:
        self.view = view
        self.options = options
        self.clock = clock
        self.kept = kept
        self.squashes_root = squashes_root
        """Whether root of this machine counts as nobody.

        Only the service knows what such a root may open, so the client sends each of its opens to the
        service.
        """
        self.callbacks = FrontEndCallbacks()
        self.tasks = BackgroundTasks()
        self.events = ClientEvents()
        self.meta = MetaClient(view, dialer, options, clock, self.events, name=name, kept=kept)
        self.leases = self.meta.leases
        self.cache = MetadataCache(options, self.leases, self.events)
        self.inodes = InodeAttributes(self.meta, self.cache, view, options, clock, self.tasks)
        self.reports = WriteReports(self.meta, self.cache, self.callbacks)
        self.paths = KnownPaths(lambda: view.map, dialer, clock)
        self.chunks = ChunkClient(
            view,
            dialer,
            options,
            clock,
            self.events,
            renew=self.inodes.refresh,
            keys=VolumeKeys(self.meta, self.inodes.volume_of),
            open_files=self.cache.open.values,
            path_text=self.paths.log_text,
        )
        self.keeping = CrashJournal(kept) if kept is not None else None
        self.writer = Writer(
            self.chunks,
            options,
            clock,
            self.events,
            refresh=self.inodes.refresh,
            report=self.reports.report,
            begin_report=self.reports.begin_report,
            keeping=self.keeping,
        )
        self.reader = Reader(
            self.chunks,
            ReadBatcher(self.chunks, dialer, options, clock),
            self.writer,
            options,
            clock,
            self.leases,
            refresh=self.inodes.look,
        )
        self.ranges = ExtentClient(self.chunks, dialer, clock)
        self.rooms = QuotaReservations(self.meta, clock)
        self.unreported = UnreportedWrites(self.cache, self.writer, self.rooms)
        view.changed.append(self.rooms.map_changed)
        self.events.leases_recalled.append(self._leases_recalled)
        self.events.leases_ended.append(self._leases_ended)
        self.events.opens_reported.append(self._opens_reported)
        self.events.shard_restarted.append(self._shard_restarted)
        self.late_closes = LateCloses(
            self.writer, self.leases, clock, self.tasks, options.late_closes and self.keeping is not None
        )

    def _shard_restarted(self, shard: int) -> None:
        self.cache.reset_inodes(lambda inode: self.meta.shard_of(inode) == shard)
        self.rooms.shard_restarted(shard)

    async def _leases_ended(self, shard: int) -> None:
        await self.late_closes.settle_if(lambda inode: self.meta.shard_of(inode) == shard)

    async def _leases_recalled(self, inodes: list[int]) -> None:
        for inode in inodes:
            self.cache.grow_old(inode)
            file = self.cache.open.get(inode)
            if file is not None:
                self.reader.changed(file)
            else:
                self.reader.forget_content(inode)
        await self.late_closes.settle(inodes)
        await self.callbacks.on_recall(inodes)

    def _opens_reported(self, inodes: list[int]) -> None:
        for inode in inodes:
            file = self.cache.open.get(inode)
            # Without a lease the shard may have registered the open too late; the next reader must
            # revalidate.
            if file is not None and self.leases.keeps_bytes(inode):
                file.unreported = False

    async def run_once(self) -> None:
        """Send and report data that has waited long enough. Renew used grants past half their life."""
        await self.writer.run_once()
        self.chunks.short.run_once()
        self.rooms.run_once()
        if self.kept is not None:
            self.kept.trim()
        self.inodes.renew_grants()

    async def close(self, deadline_s: float) -> None:
        """Store and report all written data, end the session and stop the parts, all by `deadline_s`."""
        sent = await self.writer.close(deadline_s)
        self.rooms.close()
        self.tasks.cancel()
        self.paths.close()
        await self.chunks.close()
        # Bytes in flight may still arrive at stores: so locks must not pass on before our grants end.
        await self.meta.close(min(deadline_s, self.clock.boottime_s() + 2.0), say_so=sent)
