"""FLUSH of a new file through the direct engine: answered before the stores have the data, RELEASE after it."""

from __future__ import annotations

import asyncio
import os

from nvpool.fuse.protocol.constants import Op
from tests.fuse.test_write_requests import OPTIONS, mounted


def test_flush_is_answered_while_the_stores_are_silent():
    async def main() -> None:
        async with mounted(OPTIONS._replace(late_closes=True)) as kernel:
            late = kernel.vfs.parts.late_closes
            async with asyncio.timeout(10.0):
                while not late.has_room():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            inode, handle = await kernel.new()
            content = os.urandom(5000)
            await kernel.hold_stores()
            assert await kernel.write(handle, content) == len(content)
            await kernel.flush(handle)
            assert kernel.kept.writes.valid(), "the data is in the mount state alone"
            assert await kernel.read(handle) == content
            released = kernel.send(Op.RELEASE, (handle, 0, 0, 0))
            await kernel.expect_no_reply()
            assert kernel.vfs.cache.open[inode].handles == 1
            await kernel.release_stores()
            assert (await kernel.receive())[:2] == (released, 0)
            assert inode not in kernel.vfs.cache.open and not kernel.kept.files.valid()

    asyncio.run(main())
