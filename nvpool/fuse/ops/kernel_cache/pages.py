"""Pages that the kernel caches, and how long they are valid.

At each open the kernel may keep them exactly if the inode's `change` is the one under which they were read,
or written here and nowhere else. While the file is open they are kept as long as there is a lease, which is
renewed; without a lease, for a second. Used by `fuse/ops/operations` and its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import NvpoolError
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks
from nvpool.fuse.ops.kernel_cache.options import FuseOptions
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.rpc.messages.meta_messages import Attr

HAS_XATTRS = 1
"""Bit in Attr.flags."""

SEEN_MAX = 1 << 18
"""Inodes whose pages are recorded: 40 MB at most.

The oldest makes room, and loses its pages at its next open.
"""

UNLEASED_PAGES_S = 1.0
"""Longest time to keep pages of an open file without a lease.

Another client may change such a file without a recall.
"""

LOOK_S = 0.5
"""Interval of the check whether pages of open files are still covered by a lease."""
RENEWALS_MAX = 64
"""Leases renewed at a time; other pages are dropped, and read again under a new lease."""


class CachedPages:
    """Record of the pages that the kernel of one mount may cache."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions,
        clock: Clock,
        notices: KernelNotices,
        tasks: OwnedTasks,
        published: PublishedFiles,
    ) -> None:
        self._vfs = vfs
        self._options = options
        self._clock = clock
        self._notices = notices
        self._tasks = tasks
        self._published = published
        self.seen: dict[int, tuple[int, bool]] = {}
        """inode -> (change of its pages, it had no extended attributes)."""
        self.paged: dict[int, tuple[float, bool]] = {}
        """open inode -> (its pages are valid until then, by a lease)."""
        self.looking: asyncio.TimerHandle | None = None
        """The next check of `paged`; None: nothing is to be checked."""
        self._renewing = 0
        self.guards_pages = False
        """Whether the kernel leaves it to this process to check if pages of open files are old."""

    def record_pages(self, attr: Attr) -> bool:
        """Record that the kernel has current pages of the inode from now on.

        Returns whether its pages were current before.
        """
        seen = self.seen
        before = seen.pop(attr.inode, None)
        seen[attr.inode] = attr.change, not attr.flags & HAS_XATTRS
        if len(seen) > SEEN_MAX:
            for inode in too_old(seen, SEEN_MAX):
                del seen[inode]
        return before is not None and before[0] == attr.change

    def changed_here(self, inode: int, change: int) -> None:
        """Record that a change through this mount brought the inode to `change`, and that its pages are
        valid.

        The change affected only bytes that went through the kernel's pages. So if it is the only change since
        the pages were read, they are still current.
        """
        seen = self.seen.get(inode)
        if seen is not None and seen[0] == change - 1:
            self.seen[inode] = change, seen[1]

    def paging(self, inode: int) -> None:
        """Record that the kernel gets pages of the open inode.

        It may read these pages again without a query.
        """
        if not self.guards_pages:
            return
        until_s = self._vfs.lease_until_s(inode)
        if until_s:
            self.paged[inode] = until_s, True
        else:
            self.paged[inode] = (
                self._clock.boottime_s() + min(self._options.attr_timeout_s, UNLEASED_PAGES_S),
                False,
            )
        if self.looking is None:
            self.looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def invalidate_inherited(self, inodes: set[int]) -> None:
        """Invalidate attributes and pages of open files that the kernel has from a predecessor."""
        for inode in inodes:
            self._notices.invalidate_attributes(inode)
        if self.guards_pages and inodes:
            self._drop(inodes)

    def lost(self, inode: int) -> None:
        """Drop the pages of an inode whose locks are lost.

        Programs that have it open must not read old data from these pages.
        """
        self._drop((inode,))

    def _drop(self, inodes: Iterable[int]) -> None:
        self._tasks.start(self._notices.invalidate((), inodes))

    def _look(self) -> None:
        self.looking = None
        now_s = self._clock.boottime_s()
        dropped = []
        for inode, (until_s, leased) in list(self.paged.items()):
            if until_s > now_s:
                continue
            lease_s = self._vfs.lease_until_s(inode)
            if lease_s > now_s and leased:
                self.paged[inode] = lease_s, True
                continue
            del self.paged[inode]
            self._published.take_back(inode)
            if not self._vfs.is_open(inode):
                continue  # the next open compares `change`
            if leased and self._renewing < RENEWALS_MAX:
                self._renewing += 1
                self._tasks.start(self._renew(inode))
            else:
                dropped.append(inode)
        if dropped:
            self._drop(dropped)
        if self.paged:
            self.looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    async def _renew(self, inode: int) -> None:
        """Renew an expired lease: mostly nothing has changed, and the pages need not be read again."""
        try:
            attr = await self._vfs.getattr(inode)
            seen = self.seen.get(inode)
            if seen is not None and seen[0] == attr.change and self._vfs.lease_until_s(inode):
                self.paging(inode)
                return
        except NvpoolError:
            pass  # the next reader of the file gets the error
        finally:
            self._renewing -= 1
        await self._notices.invalidate((), (inode,))
