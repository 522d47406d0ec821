"""Kernel cache coherence: which names, attributes and pages the kernel caches, and their invalidation.

A part of `fuse/ops/operations`. The kernel answers from its caches for the timeouts it was given
(FuseOptions). After a change by another client it must not use old data for longer than that, and mostly not
that long: the metadata service recalls a lease before another client may change the inode, and the mount
invalidates the kernel's caches before it acknowledges the recall. So the change comes after the kernel has
dropped the old data.

* Names: the kernel may cache a name only under a lease, on the inode or on its directory, by which a recall
  comes before the name can stand for anything else. Without a lease the kernel queries each time. Cached
  names are recorded here, to be invalidated. The kernel is not to cache absent names: they could be
  invalidated only under a lock of their directory, which a request of the kernel itself may hold.
* Overtaken notifications: a notification about a name waits for a lock of its directory, and a look-up that
  is being answered may overtake it. So if the kernel opens an inode whose names were invalidated, before it
  has looked the inode up again, the open fails once with ESTALE. Then the kernel walks the path again without
  its caches. So no open ever uses a name from before a recall.
* Attributes: each recall invalidates them; so does each open that finds a `change` that the kernel was not
  given.
* Pages: at each open the kernel may keep them exactly if the inode's `change` is the one under which
  they were read, or written here and nowhere else. While the file is open they are kept as long as there is a
  lease, which is renewed; without a lease, for a second.

Notifications are sent by a thread, and may wait there for requests that wait for this process. So a recall
waits for them for a short time only. Notice.INC_EPOCH, by which Linux 6.16 drops all names without a lock, is
not used: it unhashes directories, and whatever is mounted on such a directory (a bind mount, a tmpfs) is then
unmounted by the next walk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable
from itertools import repeat
from typing import NamedTuple

from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import DirectoryGone, NvpoolError
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.v1.meta_pb2 import Attr

HAS_XATTRS = 1
"""Bit in Attr.flags."""

SEEN_MAX = 1 << 18
"""Inodes whose pages are recorded: 40 MB at most.

The oldest makes room, and loses its pages at its next open.
"""

SENT_CHANGES_MAX = 1 << 16
"""Inodes whose `change` is recorded as last given to the kernel: 10 MB at most.

Attributes of an inode that fell out are invalidated at its next open.
"""

NAMED_MAX = 1 << 16
"""Recorded names: 12 MB at most. The kernel uses a name that fell out until its timeout."""
NAMED_TOGETHER = 512
"""Names that are recorded, and dropped, as one group."""

NOTICE_S = 0.05
"""Longest wait for a notification; mostly one takes 0.1 ms.

If it takes longer, a request is in the way that may itself wait for the change which waits for this process.
Names in directories that such a request is known to lock are not waited for: two nodes that remove the names
of one directory would wait for this time at each name.
"""

NOTICE_LOOKS = 64
"""Checks within NOTICE_S whether such a request has arrived meanwhile."""

UNLEASED_PAGES_S = 1.0
"""Longest time to keep pages of an open file without a lease.

Another client may change such a file without a recall.
"""

LOOK_S = 0.5
"""Interval of the check whether pages of open files are still covered by a lease."""
RENEWALS_MAX = 64
"""Leases renewed at a time; other pages are dropped, and read again under a new lease."""

WALK_S = 1.0
WALKING_MAX = 1024
"""Threads that were answered ESTALE and repeat the walk immediately."""
ANSWERED_MAX = 4096
"""Removed directories for which the kernel was answered ESTALE once."""

Place = tuple[int, bytes]
"""A name: its directory, and its bytes in that directory."""


class FuseOptions(NamedTuple):
    """How long the kernel answers from its caches, in seconds.

    So old attributes, names and absent names may be if another node changed them and no recall reached this
    mount. Changes through this mount are seen immediately.
    """

    attr_timeout_s: float = 1.0
    entry_timeout_s: float = 1.0
    negative_timeout_s: float = 0.0
    """Zero by default: the kernel gets no notification when a name is created."""
    writeback: bool = False
    """The kernel writes its pages later, and is the only one that changes the mounted files.

    It reads through any handle, and keeps its pages from open to open.
    """


class _Named:
    """Names that the kernel was given within a short time, and may use until `until_s`.

    For each: the inode whose recall invalidates it, its directory, the name, and the inode that it stands
    for.
    """

    __slots__ = ("until_s", "names", "_places", "_placed")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.names: list[tuple[int, int, bytes, int]] = []
        self._places: dict[int, list[tuple[int, bytes, int]]] = {}
        self._placed = 0  # entries of `names` that are indexed in `_places`

    def places_of(self, inode: int) -> list[tuple[int, bytes, int]]:
        """Names that a recall of `inode` invalidates: directory, name, and the inode that it stands for."""
        while self._placed < len(self.names):  # indexed on demand: mostly no recall comes
            cover, parent, name, child = self.names[self._placed]
            self._places.setdefault(cover, []).append((parent, name, child))
            self._placed += 1
        return self._places.get(inode, [])

    def take_back(self, inode: int) -> list[tuple[int, bytes, int]]:
        """Return the names of `places_of` and remove them from the record, for a recall."""
        return self.places_of(inode) and self._places.pop(inode)


async def _nothing(names: Iterable[Place], inodes: Iterable[int]) -> None:
    """Default of an engine that cannot invalidate."""


class CachedOps:
    def __init__(self, vfs, options, clock) -> None:
        self._vfs = vfs
        self.options = options
        self.clock = clock
        # inode -> (change of its pages, it had no extended attributes)
        self._seen: dict[int, tuple[int, bool]] = {}
        self._sent_changes: dict[
            int, int
        ] = {}  # inode -> change of the attributes that the kernel was last given
        self._named: deque[_Named] = deque()  # the oldest first
        self._named_count = 0
        self._naming = _Named(0.0)  # the newest group; names are added to it until _naming_until_s
        self._naming_until_s = 0.0
        self.name_is_kept = False
        """Whether the kernel may cache the name of the last result, for options.entry_timeout_s."""
        self._locked: dict[int, int] = {}  # directory -> number of pending requests that change names in it
        # inodes whose names were invalidated and not given to the kernel since
        self._withdrawn: dict[int, None] = {}
        self._walking: dict[int, float] = {}  # thread for which the kernel repeats a path walk -> since when
        self._answered_stale: dict[int, None] = {}  # removed directories, answered ESTALE once
        self.change_count = 0  # made through this mount; counted when they are complete
        # open inode -> (its pages are valid until then, by a lease)
        self._paged: dict[int, tuple[float, bool]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._renewing = 0
        self._forgetting: set[asyncio.Task] = set()
        self.published = PublishedFiles()
        vfs.on_recall = self._recalled
        vfs.on_unleased = self._unleased
        vfs.on_lost = self._lost
        vfs.on_reported = self._changed_here

        self.guards_pages = False
        """Set by the engine: the kernel does not check by itself whether pages of open files are old."""
        self.invalidate_attributes: Callable[[int], None] = lambda inode: None
        """Set by the engine: make the kernel query the attributes of an inode again. Must not wait."""
        self.invalidate: Callable[[Iterable[Place], Iterable[int]], Awaitable[None]] = _nothing
        """Set by the engine: invalidate these names, and drop all pages of these inodes.

        Waits for requests that lock the directories of the names, and for pages that are being read or
        written.
        """

    @property
    def knows_by(self):
        """The client's Vfs if it has caches to look into; None: the layer below answers from memory."""
        return self._vfs if hasattr(self._vfs, "cache") else None

    def flags_below(self, flags: int) -> int:
        """The flags of open(2) that matter below the kernel.

        A kernel that writes pages back does so through the handle of any writer, and through that handle
        reads the rest of a page of which it has a part; so every writer may read. It does O_APPEND by itself:
        it alone knows where the file ends, and each of its writes has a place.
        """
        if self.options.writeback:
            flags &= ~os.O_APPEND
            if flags & os.O_ACCMODE == os.O_WRONLY:
                flags ^= os.O_WRONLY | os.O_RDWR
        return flags

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """Drop the records of these inodes (inode, look-ups): the kernel has dropped them and their pages."""
        for inode, _ in forgotten:
            self._seen.pop(inode, None)
            self._sent_changes.pop(inode, None)

    def _own(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        return task

    # -- what the kernel is given --------------------------------------------------------------------------------------
    # --------------------------------------------------------------------------------------

    def _record_attr(self, attr: Attr) -> Attr:
        sent = self._sent_changes
        sent[attr.inode] = attr.change
        if len(sent) > SENT_CHANGES_MAX:
            for old in too_old(sent, SENT_CHANGES_MAX):
                del sent[old]
        return attr

    def record_name(self, parent: int, name: bytes, attr: Attr) -> Attr:
        """Record that the kernel is given these attributes for the name.

        It may cache the name if `name_is_kept` is set on return.
        """
        inode = attr.inode
        cover = self._vfs.name_cover(parent, name, inode) if self.options.entry_timeout_s else 0
        self.name_is_kept = cover != 0
        if cover:
            self.record_cached_name(cover, parent, name, inode)
        if self._withdrawn:
            self._withdrawn.pop(inode, None)
        return self._record_attr(attr)

    def record_cached_name(self, cover: int, parent: int, name: bytes, inode: int) -> None:
        """Record that the kernel caches this name, under the lease of the inode `cover`."""
        if self.clock.boottime_s() >= self._naming_until_s or len(self._naming.names) >= NAMED_TOGETHER:
            self._start_name_group()
        self._naming.names.append((cover, parent, name, inode))

    def _moving_name(self, inode: int, parent: int, name: bytes) -> None:
        """Record the new name of a cached inode, after the kernel has renamed it."""
        if inode and self.options.entry_timeout_s and any(named.places_of(inode) for named in self._named):
            self.record_cached_name(inode, parent, name, inode)

    def _record_names(
        self, parent: int, entries: DirectoryPage, first: int, until: int, untrue: Container[int]
    ) -> None:
        """Record several names at a time: the entries from `first` on and before `until`.

        Works as `record_name`. For inodes in `untrue` the kernel was given nothing that it may cache, and
        no attributes.
        """
        inodes = entries.inodes[first:until]
        if self.options.entry_timeout_s:
            if self.clock.boottime_s() >= self._naming_until_s or len(self._naming.names) >= NAMED_TOGETHER:
                self._start_name_group()
            added = zip(inodes, repeat(parent), entries.names[first:until], inodes, strict=False)
            self._naming.names += [one for one in added if one[0] not in untrue] if untrue else added
        if self._withdrawn:
            for inode in inodes:
                if inode not in untrue:
                    self._withdrawn.pop(inode, None)
        changes = zip(inodes, entries.changes[first:until], strict=True)
        self._sent_changes.update([one for one in changes if one[0] not in untrue] if untrue else changes)
        for old in too_old(self._sent_changes, SENT_CHANGES_MAX):
            del self._sent_changes[old]

    def _start_name_group(self) -> None:
        """Start a new group of names, and drop the groups that the kernel no longer uses."""
        now_s, all_named = self.clock.boottime_s(), self._named
        self._named_count += len(self._naming.names)
        while all_named and (all_named[0].until_s <= now_s or self._named_count > NAMED_MAX):
            self._named_count -= len(all_named.popleft().names)
        kept_s = self.options.entry_timeout_s
        self._naming, self._naming_until_s = _Named(now_s + kept_s + kept_s / 4), now_s + kept_s / 4
        all_named.append(self._naming)

    # -- changes by other clients --------------------------------------------------------------------------------------
    # --------------------------------------------------------------------------------------

    async def _recalled(self, inodes: list[int]) -> None:
        """Handle a recall: other clients are about to change these inodes.

        On return the kernel has been notified.
        """
        names: dict[Place, None] = {}
        paged = []
        for inode in inodes:
            self.published.take_back(inode)
            self.invalidate_attributes(inode)
            for named in self._named:
                for parent, name, child in named.take_back(inode):
                    names[parent, name] = None
                    self._withdrawn[child] = None
            if self._paged.pop(inode, None) is not None:
                paged.append(inode)
        for old in too_old(self._withdrawn, SENT_CHANGES_MAX):
            del self._withdrawn[old]
        if locked := [place for place in names if place[0] in self._locked]:
            # The kernel invalidates these only when those requests have ended. They may wait for the very
            # change that waits for this recall, so the recall does not wait for them.
            self._own(self.invalidate(locked, ()))
            for place in locked:
                del names[place]
        invalidating = self._own(self.invalidate(names, ())) if names else None
        dropping = self._own(self.invalidate((), paged)) if paged else None
        if dropping is not None:
            await asyncio.wait((dropping,), timeout=NOTICE_S)
        looks = 0
        while (
            invalidating is not None
            and not invalidating.done()
            and looks < NOTICE_LOOKS
            and not any(
                # the kernel locks a directory before its request arrives here
                parent in self._locked
                for parent, _ in names
            )
        ):
            await asyncio.wait((invalidating,), timeout=NOTICE_S / NOTICE_LOOKS)
            looks += 1

    def _unleased(self) -> None:
        """Invalidate all names: the leases that cover them have ended without a recall."""
        names: dict[Place, None] = {}
        for named in self._named:
            for _, parent, name, child in named.names:
                names[parent, name] = None
                self._withdrawn[child] = None
        for old in too_old(self._withdrawn, SENT_CHANGES_MAX):
            del self._withdrawn[old]
        self._named.clear()
        self._named_count, self._naming, self._naming_until_s = 0, _Named(0.0), 0.0
        if names:
            self._own(self.invalidate(names, ()))

    def lock_directory(self, directory: int) -> None:
        """Note a pending request that changes names in `directory`: the kernel locks it until the reply."""
        self._locked[directory] = self._locked.get(directory, 0) + 1

    def unlock_directory(self, directory: int) -> None:
        """Note that a request for which `lock_directory` was called has its reply."""
        count = self._locked.pop(directory) - 1
        if count:
            self._locked[directory] = count

    def _is_withdrawn(self, inode: int, pid: int = 0) -> bool:
        """Whether the kernel may have reached the inode by a name from before a recall.

        True once for an inode, since the kernel then walks the path again, and once for a thread: `pid` has
        repeated its walk already, and the inode that it found may have been recalled since.
        """
        if (
            self._walking
            and (since_s := self._walking.pop(pid, None)) is not None
            and (self.clock.boottime_s() - since_s < WALK_S)
        ):
            return False
        if not self._withdrawn or inode not in self._withdrawn:
            return False
        del self._withdrawn[inode]
        if pid:
            self._walking[pid] = self.clock.boottime_s()
            for old in too_old(self._walking, WALKING_MAX):
                del self._walking[old]
        return True

    def _is_kept(self, inode: int) -> bool:
        """Whether the kernel may cache a name of the inode."""
        now_s = self.clock.boottime_s()
        return any(named.until_s > now_s and named.places_of(inode) for named in self._named)

    def _is_stale(self, directory: int) -> bool:
        """Whether the kernel has to repeat the path walk to a directory that is gone.

        It has to if it may have used a cached name. True only once for a directory: a process that has it
        open, or works in it, reaches it each time.
        """
        withdrawn = self._is_withdrawn(directory)
        if directory in self._answered_stale or (not withdrawn and not self._is_kept(directory)):
            return False
        self._answered_stale[directory] = None
        for old in too_old(self._answered_stale, ANSWERED_MAX):
            del self._answered_stale[old]
        return True

    def directory_gone(self, error: DirectoryGone, *directories: int) -> DirectoryGone:
        """The error for a request that names an entry of a removed directory; mostly ENOENT, once ESTALE."""
        error.may_be_stale = any([self._is_stale(directory) for directory in directories])
        return error

    @contextlib.contextmanager
    def _changing_names(self, *directories: int):
        for directory in directories:
            self.lock_directory(directory)
        try:
            yield
        except DirectoryGone as error:
            raise self.directory_gone(error, *directories) from None
        finally:
            for directory in directories:
                self.unlock_directory(directory)
            self.change_count += 1

    def _invalidate_open_files(self, inodes: Iterable[int]) -> None:
        """Invalidate attributes and pages of open files that the kernel has from a predecessor."""
        for inode in inodes:
            self.invalidate_attributes(inode)
        if self.guards_pages and inodes:
            self._own(self.invalidate((), inodes))

    def _lost(self, inode: int) -> None:
        """Drop the pages of an inode whose locks are lost.

        Programs that have it open must not read old data from these pages.
        """
        self._own(self.invalidate((), (inode,)))

    # -- pages -----------------------------------------------------------------------------------------------------------

    def _changed_here(self, inode: int, change: int) -> None:
        """Record that a change through this mount brought the inode to `change`, and that its pages are
        valid.

        The change affected only bytes that went through the kernel's pages. So if it is the only change since
        the pages were read, they are still current.
        """
        seen = self._seen.get(inode)
        if seen is not None and seen[0] == change - 1:
            self._seen[inode] = change, seen[1]

    def record_pages(self, attr: Attr) -> bool:
        """Record that the kernel has current pages of the inode from now on.

        Returns whether its pages were current before.
        """
        seen = self._seen
        before = seen.pop(attr.inode, None)
        seen[attr.inode] = attr.change, not attr.flags & HAS_XATTRS
        if len(seen) > SEEN_MAX:
            for inode in too_old(seen, SEEN_MAX):
                del seen[inode]
        return before is not None and before[0] == attr.change

    def _paging(self, inode: int) -> None:
        """Record that the kernel gets pages of the open inode.

        It may read these pages again without a query.
        """
        if not self.guards_pages:
            return
        until_s = self._vfs.lease_until_s(inode)
        if until_s:
            self._paged[inode] = until_s, True
        else:
            self._paged[inode] = (
                self.clock.boottime_s() + min(self.options.attr_timeout_s, UNLEASED_PAGES_S),
                False,
            )
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_pages)

    def _look_at_pages(self) -> None:
        self._looking = None
        now_s = self.clock.boottime_s()
        dropped = []
        for inode, (until_s, leased) in list(self._paged.items()):
            if until_s > now_s:
                continue
            lease_s = self._vfs.lease_until_s(inode)
            if lease_s > now_s and leased:
                self._paged[inode] = lease_s, True
                continue
            del self._paged[inode]
            self.published.take_back(inode)
            if not self._vfs.is_open(inode):
                continue  # the next open compares `change`
            if leased and self._renewing < RENEWALS_MAX:
                self._renewing += 1
                self._own(self._renew(inode))
            else:
                dropped.append(inode)
        if dropped:
            self._own(self.invalidate((), dropped))
        if self._paged:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_pages)

    async def _renew(self, inode: int) -> None:
        """Renew an expired lease: mostly nothing has changed, and the pages need not be read again."""
        try:
            attr = await self._vfs.getattr(inode)
            seen = self._seen.get(inode)
            if seen is not None and seen[0] == attr.change and self._vfs.lease_until_s(inode):
                self._paging(inode)
                return
        except NvpoolError:
            pass  # the next reader of the file gets the error
        finally:
            self._renewing -= 1
        await self.invalidate((), (inode,))
