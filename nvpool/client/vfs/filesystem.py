"""The file system of a client: all operations, each implemented by one of the parts.

`Vfs` is what fuse/ops/operations, the SDK and tools use. It makes the shared parts of the client
(vfs/client_parts) and the classes of operations, and offers the operations of all of them as its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nvpool.client.data.short_circuit import ShortCircuitReads
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.client.vfs.attributes import Attributes, PoolSpace
from nvpool.client.vfs.bulk_operations import BulkOperations
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.complete_dirs import CompleteDirectories
from nvpool.client.vfs.directory_prefetch import DirectoryPrefetch
from nvpool.client.vfs.files import FileData, Files
from nvpool.client.vfs.listing import DirectoryListing, ListingPages
from nvpool.client.vfs.locks import FileLocks
from nvpool.client.vfs.lookup_batcher import LookupBatcher
from nvpool.client.vfs.namespace import Lookups, NamespaceOperations
from nvpool.client.vfs.range_operations import RangeOperations
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.client.vfs.takeover import Takeover
from nvpool.core.clock import Clock
from nvpool.rpc.connection_pool import Dialer
from nvpool.shm.mount_state import KeptMemory


class Vfs:
    """All operations of a client's file system. Made by client/pool_client, which calls `run_once` every half second.

    An operation is an attribute: the bound method of the part that implements it, so that a call takes no
    detour. Its contract is the docstring of that method.
    """

    def __init__(
        self,
        view: PoolView,
        dialer: Dialer,
        options: ClientOptions,
        clock: Clock,
        *,
        name: str,
        kept: KeptMemory | None = None,
        squashes_root: bool = False,
    ) -> None:
        parts = self.parts = ClientParts(
            view, dialer, options, clock, name=name, kept=kept, squashes_root=squashes_root
        )
        self.stripes = StripedDirectories(parts)
        self.pages = ListingPages(parts, self.stripes)
        self.lookups = Lookups(parts, self.stripes, self.pages)
        self.complete_dirs = CompleteDirectories(parts, self.stripes)
        self.names = NamespaceOperations(parts, self.stripes, self.complete_dirs, self.lookups)
        self.locks = FileLocks(parts)
        self.files = Files(parts, self.lookups, self.names, self.locks)
        self.data = FileData(parts, self.locks)
        self.space = PoolSpace(parts)
        parts.late_closes.use_room(self.space.statfs_of_pool)
        self.attributes = Attributes(parts)
        self._batcher = LookupBatcher(
            parts, self.stripes, self.lookups, DirectoryPrefetch(parts, self.stripes, self.lookups.prefetch)
        )
        self._listing = DirectoryListing(parts, self.stripes, self.pages)
        self._range_operations = RangeOperations(parts, self.data, self.space)
        self._bulk_operations = BulkOperations(parts, self.stripes, self.lookups, self.files)
        self._takeover = Takeover(parts, self.locks)
        self._offer_parts()
        self._offer_names()
        self._offer_files()

    def _offer_parts(self) -> None:
        """The shared parts, for the compiled fast paths, metrics and tools."""
        parts = self.parts
        self.options, self.clock, self.view, self.kept = parts.options, parts.clock, parts.view, parts.kept
        self.meta, self.leases, self.cache, self.paths = parts.meta, parts.leases, parts.cache, parts.paths
        self.chunks, self.ranges, self.reader = parts.chunks, parts.ranges, parts.reader
        self.writer, self.keeping, self.rooms = parts.writer, parts.keeping, parts.rooms
        self.lookup_prefetch = self.lookups.prefetch
        self.ask_all = parts.inodes.ask_all

    def _offer_names(self) -> None:
        """The operations on names, directories, attributes and the pool."""
        self.lookup = self.lookups.lookup
        self.lookup_now = self.lookups.lookup_now
        self.begin_lookup = self._batcher.begin_lookup
        self.walk = self.lookups.walk
        self.look = self.lookups.look
        self.name_cover = self.lookups.name_cover
        self.readlink = self.names.readlink
        self.mknod = self.names.mknod
        self.mkdir = self.names.mkdir
        self.make_volume = self.names.make_volume
        self.symlink = self.names.symlink
        self.link = self.names.link
        self.unlink = self.names.unlink
        self.begin_unlink = self.names.begin_unlink
        self.rmdir = self.names.rmdir
        self.rename = self.names.rename
        self.forget_name = self.names.forget_name

        self.opendir = self._listing.opendir
        self.readdir = self._listing.readdir
        self.outdated = self._listing.outdated
        self.unpromised = self._listing.unpromised
        self.releasedir = self._listing.releasedir
        self.fsyncdir = self._listing.fsyncdir

        self.getattr = self.attributes.getattr
        self.getattr_now = self.lookups.getattr_now
        self.known_attr = self.attributes.known_attr
        self.size_here = self.attributes.size_here
        self.is_open = self.attributes.is_open
        self.lease_until_s = self.attributes.lease_until_s
        self.setattr = self.attributes.setattr
        self.birth_ns = self.attributes.birth_ns
        self.spread = self.attributes.spread
        self.hand_down = self.attributes.hand_down
        self.access = self.attributes.access
        self.getxattr = self.attributes.getxattr
        self.setxattr = self.attributes.setxattr
        self.listxattr = self.attributes.listxattr
        self.removexattr = self.attributes.removexattr
        self.statfs = self.space.statfs
        self.statfs_of_pool = self.space.statfs_of_pool

    def _offer_files(self) -> None:
        """The operations on files, their bytes and their locks."""
        self.open = self.files.open
        self.open_now = self.files.open_now
        self.create = self.files.create
        self.create_unnamed = self.files.create_unnamed
        self.begin_create = self.files.begin_create
        self.may_be_written = self.files.may_be_written
        self.go_on_creating = self.files.go_on_creating
        self.release = self.files.release
        self.release_now = self.files.release_now

        self.read = self.data.read
        self.read_now = self.data.read_now
        self.begin_read = self.data.begin_read
        self.unreported_check = self.data.unreported_check
        self.read_many = self.data.read_many
        self.write = self.data.write
        self.write_now = self.data.writes.write_now
        self.append = self.data.append
        self.flush = self.data.flush
        self.begin_flush = self.data.writes.begin_flush
        self.is_flushed = self.data.writes.is_flushed
        self.is_settled = self.data.is_settled
        self.fsync = self.data.fsync

        self.fallocate = self._range_operations.fallocate
        self.seek = self._range_operations.seek
        self.copy_range = self._range_operations.copy_range

        self.walk_many = self._bulk_operations.walk_many
        self.open_many = self._bulk_operations.open_many
        self.read_whole = self._bulk_operations.read_whole

        self.getlk = self.locks.getlk
        self.setlk = self.locks.setlk
        self.flock = self.locks.flock
        self.locks_on = self.locks.locks_on
        self.is_locked = self.locks.is_locked
        self.release_owner = self.locks.release_owner

        self.take_over = self._takeover.take_over

    @property
    def squashes_root(self) -> bool:
        """Whether root of this machine counts as nobody; then the client sends each of its opens to the service."""
        return self.parts.squashes_root

    @property
    def short_circuit(self) -> ShortCircuitReads:
        """The short-circuit reads of this client."""
        return self.chunks.short

    # -- callbacks of a front end --------------------------------------------------------------------------------------

    @property
    def on_lost(self) -> Callable[[int], None]:
        """Called when the locks on an open inode are lost; see FrontEndCallbacks."""
        return self.parts.callbacks.on_lost

    @on_lost.setter
    def on_lost(self, callback: Callable[[int], None]) -> None:
        self.parts.callbacks.on_lost = callback

    @property
    def on_recall(self) -> Callable[[list[int]], Awaitable[None]]:
        """Called before other clients change inodes under leases of this client; see FrontEndCallbacks."""
        return self.parts.callbacks.on_recall

    @on_recall.setter
    def on_recall(self, callback: Callable[[list[int]], Awaitable[None]]) -> None:
        self.parts.callbacks.on_recall = callback

    @property
    def on_reported(self) -> Callable[[int, int], None]:
        """Called after this client has reported its own writes; see FrontEndCallbacks."""
        return self.parts.callbacks.on_reported

    @on_reported.setter
    def on_reported(self, callback: Callable[[int, int], None]) -> None:
        self.parts.callbacks.on_reported = callback

    @property
    def on_unleased(self) -> Callable[[], None]:
        """Called when a shard's leases end all together, without a recall for each inode. Must not wait.

        Set by a front end that caches attributes or names beyond a call.
        """
        return self.leases.on_end_all

    @on_unleased.setter
    def on_unleased(self, callback: Callable[[], None]) -> None:
        self.leases.on_end_all = callback

    # -- batches and background work -----------------------------------------------------------------------------------

    def hold_reads(self) -> None:
        """Batch the reads and look-ups that begin before `send_reads`: one message per target or shard.

        The caller calls both in the same event-loop iteration.
        """
        self.chunks.reads.hold()
        self._batcher.hold()

    def send_reads(self) -> None:
        """Send the look-ups and reads that were batched since `hold_reads`."""
        self._batcher.send()
        self.chunks.reads.send_held()

    async def run_once(self) -> None:
        """Send and report data that has waited long enough; renew grants; correct doubtful locks."""
        await self.parts.run_once()
        await self.locks.run_once()

    async def close(self, deadline_s: float) -> None:
        """Store and report all written data, end the session and stop the parts, all by `deadline_s`."""
        self.locks.close()
        await self.parts.close(deadline_s)
