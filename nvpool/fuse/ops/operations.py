"""File operations: the meaning of each FUSE request, for any engine that speaks to the kernel.

An engine (`fuse/kernel`, `fuse/pyfuse3_engine`) decodes a request, calls the method here and encodes the
result; it turns an exception into an errno with `errno_of`. The code here depends on no FUSE library and on
no structure of the kernel, so tests run all of it without a mount. Below is the client's Vfs; this layer adds
only what a *kernel* needs:

* The node id is the inode number. A look-up pins nothing, so look-ups are not counted, and a forget only
  drops the record of what the kernel caches. Memory does not grow with the number of files that the kernel
  knows.
* What the kernel caches of names, attributes and pages, and how that is invalidated: `fuse/ops/kernel_cache`.
* Requests for names and attributes: `fuse/ops/metadata`. Listings and their read-ahead: `fuse/ops/listing`.
  Extended attributes: `fuse/ops/xattrs`.
* Open files and directories get numbers (`fuse/ops/handles`), valid from open to release. Opening, reading
  and closing: `fuse/ops/open_files`; writing: `fuse/ops/writes`. Privileges that a write removes from a
  program: `fuse/ops/setid`.
* Locks, and what the kernel has to drop when it gets one: `fuse/ops/locks`.
* Open files and requests of a predecessor of this process: `fuse/ops/replay`.

FuseOps makes these parts, and has the function of each request as an attribute.

The kernel checks permissions (mount option default_permissions). Methods whose name is in BY_INODE fail with
ESTALE if the inode is gone: Linux then walks the path once more without its caches, and so finds a file that
was replaced on another node. A file without a name can be opened while it is open here
(/proc/self/fd), and by a process that has just looked it up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import DirectoryGone, NotFound, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import PageCacheBypass
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.kernel_cache.recalls import LeaseRecalls
from nvpool.fuse.ops.listing import DirectoryListings
from nvpool.fuse.ops.locks import AbsentNames, LockRequests
from nvpool.fuse.ops.metadata import NamesAndAttributes
from nvpool.fuse.ops.mount_views import MountView
from nvpool.fuse.ops.open_files import FileReads, OpenFiles
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.fuse.ops.replay import Replay
from nvpool.fuse.ops.setid import Privileges
from nvpool.fuse.ops.writes import FileWrites
from nvpool.fuse.ops.xattrs import ExtendedAttributes
from nvpool.shm.mount_state import KeptMemory

log = logging.getLogger(__name__)

BY_INODE = frozenset(
    (
        "getattr",
        "setattr",
        "readlink",
        "open",
        "opendir",
        "link",
        "getxattr",
        "setxattr",
        "listxattr",
        "removexattr",
        "access",
        "statx",
    )
)
"""Requests that name an inode which the kernel once looked up."""


def errno_of(error: BaseException, request: str) -> int:
    """The errno that the application sees. This is the only place that maps errors to numbers for the kernel.

    An exception that is not an NvpoolError is a bug: EIO, and the log has the traceback.
    """
    if isinstance(error, DirectoryGone):
        return errno.ESTALE if error.may_be_stale else errno.ENOENT
    if isinstance(error, NotFound) and request in BY_INODE:
        return errno.ESTALE
    if isinstance(error, errors.Bug):
        log.error("%s: %s", request, error, exc_info=error)
        return error.errno
    if isinstance(error, NvpoolError):
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, asyncio.CancelledError):
        return errno.EINTR
    log.error("%s: unexpected %s", request, type(error).__name__, exc_info=error)
    return errno.EIO


class FuseOps:
    """All operations of one mount; see the module. Used from one event loop; calls may overlap."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        root: int = ROOT_INODE,
        read_only: bool = False,
    ) -> None:
        """`vfs`: the client's Vfs, or a file system in memory. `root`: inode of the directory that is shown.

        `read_only`: every change raises ReadOnly.
        """
        self.vfs = vfs
        self.options = options = options or FuseOptions()
        self.clock = clock
        self.view = MountView(root, read_only)
        self.kept: KeptMemory | None = getattr(vfs, "kept", None)
        """The mount state, which outlives this process; None without one."""
        tasks = OwnedTasks()
        self.notices = KernelNotices(root)
        self.changes = ChangeCount()
        self.handles = Handles(self.kept)
        self.published = PublishedFiles(self.handles)
        self.cached_names = CachedNames(vfs, options, clock, self.changes)
        self.cached_pages = CachedPages(vfs, options, clock, self.notices, tasks, self.published)
        self.absent_names = AbsentNames(options, clock)
        self.bypass = PageCacheBypass(self.notices, tasks)
        privileges = Privileges(vfs, self.notices)
        self.recalls = LeaseRecalls(self.cached_names, self.cached_pages, self.published, self.notices, tasks)
        self.files = OpenFiles(
            vfs,
            options,
            self.handles,
            self.changes,
            self.cached_names,
            self.cached_pages,
            self.bypass,
            self.published,
            privileges,
            self.notices,
            tasks,
        )
        self.writes = FileWrites(
            vfs, options, self.files, self.changes, self.cached_pages, self.bypass, privileges
        )
        listings = DirectoryListings(
            vfs, options, clock, root, self.handles, self.changes, self.cached_names, tasks
        )
        self.metadata = NamesAndAttributes(
            vfs,
            options,
            not self.view.shows_subtree,
            self.changes,
            self.cached_names,
            self.absent_names,
            self.cached_pages,
            self.bypass,
            self.published,
            self.files,
            listings,
        )
        self.xattrs = ExtendedAttributes(vfs, self.changes, self.cached_pages)
        self.replay = Replay(
            vfs,
            self.kept,
            options,
            self.handles,
            self.files,
            listings,
            self.metadata,
            self.cached_names,
            self.absent_names,
            self.cached_pages,
            self.bypass,
            self.published,
        )
        locks = LockRequests(
            vfs, self.files, self.cached_names, self.absent_names, self.published, self.notices, tasks
        )
        self._bind_metadata(self.view, self.metadata, self.xattrs)
        self._bind_files(
            self.view, self.files, self.writes, FileReads(vfs, options, self.files, self.cached_pages)
        )
        self._bind_directories_and_locks(self.view, listings, locks)
        self._bind_replay(self.replay)
        vfs.on_recall = self.recalls.recalled
        vfs.on_unleased = self.recalls.unleased
        vfs.on_lost = self.cached_pages.lost
        vfs.on_reported = self.cached_pages.changed_here

    # Most requests are bound to the methods of the parts, without a call in between: see there for contracts.

    def _bind_metadata(
        self, view: MountView, metadata: NamesAndAttributes, xattrs: ExtendedAttributes
    ) -> None:
        self.lookup = view.by_inode(metadata.lookup)
        self.lookup_now = view.by_inode(metadata.lookup_now)
        self.begin_lookup = view.by_inode(metadata.begin_lookup)
        self.getattr = view.by_inode(metadata.getattr)
        self.getattr_now = view.by_inode(metadata.getattr_now)
        self.setattr = view.change(view.by_inode(metadata.setattr))
        self.readlink = view.by_inode(metadata.readlink)
        self.mknod = view.change(view.by_inode(metadata.mknod))
        self.mkdir = view.change(view.by_inode(metadata.mkdir))
        self.symlink = view.change(view.by_inode(metadata.symlink))
        self.link = view.change(view.link(metadata.link))
        self.unlink = view.change(view.by_inode(metadata.unlink))
        self.begin_unlink = view.begin_change(view.by_inode(metadata.begin_unlink))
        self.rmdir = view.change(view.by_inode(metadata.rmdir))
        self.rename = view.change(view.rename(metadata.rename))
        self.access = view.by_inode(metadata.access)
        self.statx = view.by_inode(metadata.statx)
        self.has_no_xattr = view.by_inode(xattrs.has_no_xattr)
        self.getxattr = view.by_inode(xattrs.getxattr)
        self.setxattr = view.change(view.by_inode(xattrs.setxattr))
        self.listxattr = view.by_inode(xattrs.listxattr)
        self.removexattr = view.change(view.by_inode(xattrs.removexattr))

    def _bind_files(self, view: MountView, files: OpenFiles, writes: FileWrites, reads: FileReads) -> None:
        self.open = view.opening(view.by_inode(files.open))
        self.open_now = view.opening_now(view.by_inode(files.open_now))
        self.create = view.change(view.by_inode(files.create))
        self.begin_create = view.begin_change(view.by_inode(files.begin_create))
        self.create_unnamed = view.change(view.by_inode(files.create_unnamed))
        self.has_pages = files.has_pages
        self.is_locked = files.is_locked
        self.release = files.release
        self.release_now = files.release_now
        self.drain = files.drain
        self.read = reads.read
        self.read_now = reads.read_now
        self.begin_read = reads.begin_read
        self.lseek = reads.lseek
        self.write = view.change(writes.write)
        self.write_now = view.change_now(writes.write_now)
        self.syncs_itself = writes.syncs_itself
        self.synced = writes.synced
        self.flush = writes.flush
        self.begin_flush = writes.begin_flush
        self.fsync = writes.fsync
        self.fallocate = view.change(writes.fallocate)
        self.copy_file_range = view.change(writes.copy_file_range)

    def _bind_directories_and_locks(
        self, view: MountView, listings: DirectoryListings, locks: LockRequests
    ) -> None:
        self.opendir = view.by_inode(listings.opendir)
        self.readdir = listings.readdir
        self.releasedir = listings.releasedir
        self.fsyncdir = listings.fsyncdir
        self.getlk = locks.getlk
        self.setlk = locks.setlk
        self.flock = locks.flock

    def _bind_replay(self, replay: Replay) -> None:
        self.take_over = replay.take_over
        self.invalidate_inherited = replay.invalidate_inherited
        self.open_again = replay.open_again
        self.create_again = replay.create_again
        self.handle_before = replay.handle_before
        self.written_before = replay.written_before
        self.all_came_again = replay.all_came_again
        self.answered = replay.answered

    def statfs(self, node: int = ROOT_INODE) -> Coroutine[Any, Any, Any]:
        """Usage of the volume that contains the node, or of the pool."""
        return self.metadata.statfs(self.view.here(node))

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """Drop the records of these inodes (inode, look-ups): the kernel has dropped them and their pages."""
        seen, sent_changes, view = self.cached_pages.seen, self.cached_names.sent_changes, self.view
        if view.shows_subtree:
            forgotten = [(view.here(inode), count) for inode, count in forgotten]
        for inode, _ in forgotten:
            seen.pop(inode, None)
            sent_changes.pop(inode, None)

    def burst(self) -> None:
        """Announce that several requests may follow before `burst_over`. Reads among them are batched."""
        self.vfs.hold_reads()

    def burst_over(self) -> None:
        """Send the reads that were batched since `burst`."""
        self.vfs.send_reads()

    # -- for the engine ------------------------------------------------------------------------------------------------

    def set_kernel_features(self, *, guards_pages: bool = False, keeps_acls: bool = False) -> None:
        """Set what was agreed with the kernel.

        `guards_pages`: the kernel does not check by itself whether pages of open files are old. `keeps_acls`:
        it enforces access control lists.
        """
        self.cached_pages.guards_pages = guards_pages
        self.xattrs.keeps_acls = keeps_acls

    @property
    def name_is_kept(self) -> bool:
        """Whether the kernel may cache the name of the last result, for options.entry_timeout_s."""
        return self.cached_names.name_is_kept

    @property
    def held(self) -> dict[int, Any]:
        """Requests whose reply must be reported to `answered`. Always empty without a mount state."""
        return self.replay.held

    @property
    def open_files(self) -> int:
        """Number of open files."""
        return len(self.files.by_handle)

    @property
    def knows_by(self) -> Any:
        """The client's Vfs if it has caches to look into; None: the layer below answers from memory."""
        return self.vfs if hasattr(self.vfs, "cache") else None

    @property
    def chunks(self) -> Any:
        """The client's chunk reader; None: the layer below answers from memory."""
        return getattr(self.vfs, "chunks", None)

    @property
    def short_circuit(self) -> Any:
        """The client's short-circuit reads from drives of this host.

        None: the layer below answers from memory.
        """
        return getattr(self.vfs, "short_circuit", None)
