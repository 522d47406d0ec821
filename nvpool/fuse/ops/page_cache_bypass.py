"""Pages that the kernel keeps of an open file and that a change of the file does not go through; a part of
`fuse/ops/operations`.

* A write with O_DIRECT, or through a descriptor that was opened with O_APPEND, bypasses the pages. The kernel drops pages of
  the range before it sends the write, and those of an asynchronous write not after it. A descriptor that reads through pages
  meanwhile leaves old ones behind. So they are dropped again when the bytes are taken and before the write is answered.
* A program may store bytes in its mapping behind the file's end, in the last page. The kernel never clears them on FUSE;
  when the file grows over them they would become its content. So the rest of the last page is set to zeros before growth is
  answered. After the answer is too late: the kernel may have written the page back by then, or the program may have stored
  bytes there that count.
* A write that begins in the last page may have locked it until the write is answered. The kernel locks only a page that it has
  not read (Linux 5.13 and newer), and such a page is not mapped. So the page is dropped, and the answer waits for that no
  longer than LOCKED_S: a page that is dropped later loses nothing, but zeros set later would replace bytes of the file.

* A kernel that writes pages back (--writeback) has a size of its own, and goes by it though a write was refused. It drops it
  with the inode: so its names are taken back when nobody here has the file open any more.

The first two wait for pages that are being read, at most PAGES_S. The engine sets `drop`, `store` and `forget`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable

ASIDE = os.O_APPEND | os.O_DIRECT
"""Flags of an open file that its kernel sends with each write: where one is set the common way of a write may not do."""

PAGES_S = 1.0
"""Mostly it takes 0.1 ms. Longer, and a page waits for a store that is silent; it is dropped when that has answered."""

LOCKED_S = 0.05
"""Limit of the wait for the last page, which the write that waits may have locked. Mostly the drop takes 0.1 ms."""
UNWAITED_MAX = 64
"""Limit of a file's writes that do not wait, after 1, 2, 4, … of them: one full wait in 65 writes costs each below 1 ms."""


async def _nothing(*_) -> None:
    """An engine that cannot."""


class Bypassing:
    def __init__(self, own: Callable) -> None:
        """`own(coroutine)` makes a task that the file system keeps."""
        self._own = own
        self._bypass: dict[int, int] = {}  # inode -> how many of its open descriptors bypass pages
        self.locked: dict[int, tuple[int, int]] = {}
        """Open inode whose last page could not be dropped in time -> how many writes do not wait now, and how many at first."""
        self.drop: Callable[[int, int, int], Awaitable[None]] = _nothing
        """Set by the engine: drop the pages of (inode, offset, length). Waits for pages that are being read."""
        self.store: Callable[[int, int, bytes], Awaitable[None]] = _nothing
        """Set by the engine: put bytes of (inode, offset) into the pages. Waits as `drop`."""
        self.forget: Callable[[list[tuple[int, bytes]]], Awaitable[None]] = _nothing
        """Set by the engine: have the kernel drop names (directory, name), and with the last one an inode that is not open."""
        self.refused: set[int] = set()
        """Open inodes of which the kernel may have pages and a size that were refused."""

    def opened(self, inode: int) -> None:
        """One descriptor more that bypasses pages."""
        self._bypass[inode] = self._bypass.get(inode, 0) + 1

    def closed(self, inode: int) -> None:
        count = self._bypass.get(inode, 0)
        if count > 1:
            self._bypass[inode] = count - 1
        elif count:
            del self._bypass[inode]

    def has_pages(self, file) -> bool:
        """Whether another open descriptor reads the file through pages."""
        return file.file.handles > self._bypass.get(file.inode, 0)

    async def written(self, file, offset: int, length: int) -> None:
        """[offset, offset + length) was written past the pages."""
        if self.has_pages(file):
            await self._within(self.drop(file.inode, offset, length))

    def refuse(self, inode: int) -> None:
        """What the kernel has written back was refused: it has told of that, and is not to show it."""
        self.refused.add(inode)
        self.moved(inode, 0)

    def forget_refused(self, inode: int, names: list[tuple[int, bytes]]) -> None:
        """Forget the inode: no process of this node has it open any more."""
        self.refused.discard(inode)
        self._own(self.forget(names))

    def moved(self, inode: int, offset: int) -> None:
        """From `offset` on pages have other bytes than the file: a record went to another place than the kernel had it."""
        self._own(self.drop(inode, offset, 0))

    async def growing(self, inode: int, size: int, until: int) -> None:
        """The file, which ended at `size`, ends at `until` or behind it, and nothing between is written."""
        end = min(until, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if size < end:
            await self._within(self.store(inode, size, bytes(end - size)))

    async def written_behind(self, inode: int, size: int, offset: int) -> None:
        """As `growing`, by a write at `offset`, before it is answered."""
        if offset // mmap.PAGESIZE > size // mmap.PAGESIZE:
            await self.growing(inode, size, offset)
        elif size % mmap.PAGESIZE:
            await self._drop_last(inode, size, offset - size)

    async def _drop_last(self, inode: int, offset: int, length: int) -> None:
        """Drop the page of the range, which the write in work may have locked."""
        dropping = self._own(self.drop(inode, offset, length))
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
        """No process of this node has the inode open any more."""
        self.locked.pop(inode, None)

    async def _within(self, work: Awaitable[None]) -> None:
        await asyncio.wait((self._own(work),), timeout=PAGES_S)


def may_have_tail(file) -> bool:
    """Whether somebody may have stored bytes behind the end in the last page: by a mapping, for which he has the file open to
    read and write."""
    return bool(file.size % mmap.PAGESIZE) and (file.file.handles > 1 or file.flags & os.O_ACCMODE == os.O_RDWR)


def bypasses(flags: int) -> bool:
    """Whether a descriptor that is opened so is used past the pages."""
    return bool(flags & os.O_DIRECT) or bool(flags & os.O_APPEND and flags & os.O_ACCMODE != os.O_RDONLY)
