"""Recalls of leases: the kernel drops what it caches of an inode before another client may change it.

Notifications are sent by a thread, and may wait there for requests that wait for this process. So a recall
waits for them for a short time only. Notice.INC_EPOCH, by which Linux 6.16 drops all names without a lock, is
not used: it unhashes directories, and whatever is mounted on such a directory (a bind mount, a tmpfs) is then
unmounted by the next walk. Used by `fuse/ops/operations`, which registers these methods with the client.
"""

from __future__ import annotations

import asyncio

from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.read_worker_files import PublishedFiles

NOTICE_S = 0.05
"""Longest wait for a notification; mostly one takes 0.1 ms.

If it takes longer, a request is in the way that may itself wait for the change which waits for this process.
Names in directories that such a request is known to lock are not waited for: two nodes that remove the names
of one directory would wait for this time at each name.
"""

NOTICE_LOOKS = 64
"""Checks within NOTICE_S whether such a request has arrived meanwhile."""


class LeaseRecalls:
    """The kernel's side of a recall, and of leases that end without one."""

    def __init__(
        self,
        names: CachedNames,
        pages: CachedPages,
        published: PublishedFiles,
        notices: KernelNotices,
        tasks: OwnedTasks,
    ) -> None:
        self._names = names
        self._pages = pages
        self._published = published
        self._notices = notices
        self._tasks = tasks

    async def recalled(self, inodes: list[int]) -> None:
        """Handle a recall: other clients are about to change these inodes.

        On return the kernel has been notified.
        """
        notices, tasks, locks = self._notices, self._tasks, self._names.locked
        paged = []
        for inode in inodes:
            self._published.take_back(inode)
            notices.invalidate_attributes(inode)
            if self._pages.paged.pop(inode, None) is not None:
                paged.append(inode)
        names = self._names.withdraw(inodes)
        if locked := [place for place in names if place[0] in locks]:
            # The kernel invalidates these only when those requests have ended. They may wait for the very
            # change that waits for this recall, so the recall does not wait for them.
            tasks.start(notices.invalidate(locked, ()))
            for place in locked:
                del names[place]
        invalidating = tasks.start(notices.invalidate(names, ())) if names else None
        dropping = tasks.start(notices.invalidate((), paged)) if paged else None
        if dropping is not None:
            await asyncio.wait((dropping,), timeout=NOTICE_S)
        looks = 0
        while (
            invalidating is not None
            and not invalidating.done()
            and looks < NOTICE_LOOKS
            and not any(
                # the kernel locks a directory before its request arrives here
                parent in locks
                for parent, _ in names
            )
        ):
            await asyncio.wait((invalidating,), timeout=NOTICE_S / NOTICE_LOOKS)
            looks += 1

    def unleased(self) -> None:
        """Invalidate all names: the leases that cover them have ended without a recall."""
        names = self._names.withdraw_all()
        if names:
            self._tasks.start(self._notices.invalidate(names, ()))
