"""Growth by a write in the last page: which pages are dropped, and how long the write waits for the drop."""

import asyncio

import pytest

from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import UNWAITED_MAX, PageCacheBypass

INODE = 7


class Kernel:
    """Effect of notices on the pages of a real kernel: a drop waits until `locked` is set."""

    def __init__(self):
        self.dropped, self.begun, self.locked = [], 0, None
        self.notices = KernelNotices()
        self.notices.connect(drop=self.drop, store=self.store)

    async def drop(self, *what):
        self.begun += 1
        if self.locked is not None:
            await self.locked.wait()
        self.dropped.append(what)

    async def store(self, *what):
        pytest.fail(f"zeros would replace what comes after the write: {what}")


def test_write_behind_the_end_in_its_page_drops_it_first():
    async def main():
        kernel = Kernel()
        pages = PageCacheBypass(kernel.notices, OwnedTasks())
        await pages.written_behind(INODE, 5000, 5100)
        assert kernel.dropped == [(INODE, 5000, 100)]
        assert not pages.locked

    asyncio.run(main())


def test_write_that_locks_its_page_seldom_waits():
    async def main():
        kernel, waited = Kernel(), []
        pages = PageCacheBypass(kernel.notices, OwnedTasks())
        kernel.locked = asyncio.Event()
        for number in range(3 * UNWAITED_MAX):
            await pages.written_behind(INODE, 5000 + number, 5001 + number)
            left, most = pages.locked[INODE]
            if left == most:
                waited.append(number)
        assert waited == [0, 2, 5, 10, 19, 36, 69, 134]
        kernel.locked.set()
        await asyncio.sleep(0.01)
        assert kernel.begun == len(kernel.dropped) == 3 * UNWAITED_MAX
        pages.released(INODE)
        assert not pages.locked

    asyncio.run(main())


def test_page_dropped_in_time_is_waited_for_again():
    async def main():
        kernel = Kernel()
        pages = PageCacheBypass(kernel.notices, OwnedTasks())
        kernel.locked = asyncio.Event()
        await pages.written_behind(INODE, 5000, 5100)
        await pages.written_behind(INODE, 5101, 5200)
        kernel.locked.set()
        await pages.written_behind(INODE, 5201, 5300)
        assert not pages.locked

    asyncio.run(main())
