"""Coherence of the kernel's pages of a file with changes that bypass those pages.

A part of `fuse/ops/operations`.

* A write with O_DIRECT, or through a descriptor that was opened with O_APPEND, bypasses the pages. The kernel
  drops pages of the range before it sends the write, and for an asynchronous write not after it. A descriptor
  that reads through pages meanwhile leaves old ones behind. So they are dropped again when the bytes are
  taken, before the write is answered.
* A program may store bytes through its mapping after the file's end, in the last page. The kernel never
  clears them on FUSE; when the file grows over them they would become file data. So the rest of the last page
  is zeroed before the growth is answered. After the reply it would be too late: the kernel may have written
  the page back by then, or the program may have stored valid bytes there.
* A write that begins in the last page may have locked that page until the write is answered. The kernel locks
  only a page that it has not read (Linux 5.13 and newer), and such a page is not mapped. So the page is
  dropped, and the reply waits for that no longer than LOCKED_S: a page that is dropped later loses nothing,
  but zeros that are set later would replace bytes of the file.
* A kernel that writes pages back (--writeback) has its own file size, and continues to use it even if a write
  was refused. It drops that size with the inode. So the inode's names are invalidated when no process here
  has the file open any more.

The first two wait for pages that are being read, at most PAGES_S.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Coroutine
from typing import Any

from nvpool.client.state.vfs_types import FileHandle
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks

ASIDE = os.O_APPEND | os.O_DIRECT
"""Flags of an open file that the kernel sends with each write.

With one of them the fast path may be wrong.
"""

PAGES_S = 1.0
"""Longest wait; mostly it takes 0.1 ms.

If it takes longer, a page waits for a store that does not answer; it is dropped after that answer.
"""

LOCKED_S = 0.05
"""Longest wait for the drop of the last page; mostly it takes 0.1 ms.

The write that waits may itself have locked the page.
"""
UNWAITED_MAX = 64
"""Most writes of a file in a row that do not wait for the drop, after a wait has timed out.

Their number is 1, 2, 4, … for each timeout. One full wait in 65 writes costs each write less than 1 ms.
"""


class PageCacheBypass:
    """Descriptors of one mount that bypass the kernel's pages, and what their changes do to pages."""

    def __init__(self, notices: KernelNotices, tasks: OwnedTasks) -> None:
        self._notices = notices
        self._tasks = tasks
        self._bypass: dict[int, int] = {}  # inode -> how many of its open descriptors bypass pages
        self.locked: dict[int, tuple[int, int]] = {}
        """Open inodes whose last page could not be dropped in time.

        inode -> (how many of the next writes do not wait, how many these were at first).
        """
        self.refused: set[int] = set()
        """Open inodes of which the kernel may have refused pages and a wrong size."""

    def opened(self, inode: int) -> None:
        """Count one more descriptor that bypasses pages."""
        self._bypass[inode] = self._bypass.get(inode, 0) + 1

    def closed(self, inode: int) -> None:
        """Count one descriptor less that bypasses pages."""
        count = self._bypass.get(inode, 0)
        if count > 1:
            self._bypass[inode] = count - 1
        elif count:
            del self._bypass[inode]

    def has_pages(self, file: FileHandle) -> bool:
        """Whether another open descriptor reads the file through pages."""
        return file.file.handles > self._bypass.get(file.inode, 0)

    async def written(self, file: FileHandle, offset: int, length: int) -> None:
        """Drop old pages after [offset, offset + length) was written past them."""
        if self.has_pages(file):
            await self._within(self._notices.drop(file.inode, offset, length))

    def refuse(self, inode: int) -> None:
        """Drop pages whose write-back was refused.

        The kernel has reported the error, and must not show these pages.
        """
        self.refused.add(inode)
        self.moved(inode, 0)

    def forget_refused(self, inode: int, names: list[tuple[int, bytes]]) -> None:
        """Make the kernel forget the inode: no process of this node has it open any more."""
        self.refused.discard(inode)
        self._tasks.start(self._notices.forget(names))

    def moved(self, inode: int, offset: int) -> None:
        """Drop the pages from `offset` on: a record went to another place than the kernel assumed."""
        self._tasks.start(self._notices.drop(inode, offset, 0))

    async def growing(self, inode: int, size: int, until: int) -> None:
        """Zero the last page after `size`, before the file grows.

        The file will end at `until` or later, and nothing in between is written.
        """
        end = min(until, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if size < end:
            await self._within(self._notices.store(inode, size, bytes(end - size)))

    async def written_behind(self, inode: int, size: int, offset: int) -> None:
        """Do as `growing`, for a write at `offset` that is not answered yet.

        If the write begins in the last page itself, that page is dropped instead of zeroed.
        """
        if offset // mmap.PAGESIZE > size // mmap.PAGESIZE:
            await self.growing(inode, size, offset)
        elif size % mmap.PAGESIZE:
            await self._drop_last(inode, size, offset - size)

    async def _drop_last(self, inode: int, offset: int, length: int) -> None:
        """Drop the page of the range, which the pending write may have locked."""
        dropping = self._tasks.start(self._notices.drop(inode, offset, length))
        unwaited, most = self.locked.get(inode, (0, 0))
        if unwaited:
            self.locked[inode] = unwaited - 1, most
            return
        await asyncio.wait((dropping,), timeout=LOCKED_S)
        if dropping.done():
            self.locked.pop(inode, None)
        else:
            most = min(max(2 * most, 1), UNWAITED_MAX)
            self.locked[inode] = most, most

    def released(self, inode: int) -> None:
        """Forget the inode's state: no process of this node has it open any more."""
        self.locked.pop(inode, None)

    async def _within(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait((self._tasks.start(work),), timeout=PAGES_S)


def may_have_tail(file: FileHandle) -> bool:
    """Whether a mapping may have stored bytes after the end, in the last page.

    A mapping needs the file open for reading and writing.
    """
    return bool(file.size % mmap.PAGESIZE) and (
        file.file.handles > 1 or file.flags & os.O_ACCMODE == os.O_RDWR
    )


def bypasses(flags: int) -> bool:
    """Whether a descriptor opened with these flags bypasses the pages.

    A mapping of a descriptor with O_DIRECT does not, nor does one whose O_DIRECT was cleared since: the kernel
    reports neither. To count those as readers of pages would cost each asynchronous direct write a notice.
    docs/reference/semantics.md names what may be stale then.
    """
    return bool(flags & os.O_DIRECT) or bool(flags & os.O_APPEND and flags & os.O_ACCMODE != os.O_RDONLY)
