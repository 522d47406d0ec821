"""An open file of the asyncio SDK."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, Caller, FileHandle
from nvpool.sdk.argument_checks import bytes_of, integer, size_of
from nvpool.sdk.paths import Path, as_os_error, stat_result, write_all

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from nvpool.client.vfs.filesystem import Vfs


class AsyncFile:
    """An open file without a file position: each read and write names its offset. Use `async with`, or
    call `close`."""

    def __init__(self, vfs: Vfs, path: Path, handle: FileHandle) -> None:
        self.path = path
        self.handle = handle
        self.vfs = vfs

    @property
    def size(self) -> int:
        """Bytes of the file, as far as this handle knows."""
        return self.handle.size

    async def read(self, offset: int, length: int) -> memoryview | bytes:
        """Read up to `length` bytes at `offset`. The result is shorter only at the end of the file."""
        if type(offset) is not int or type(length) is not int:
            offset, length = integer("offset", offset), integer("length", length)
        with as_os_error(self.path):
            return await self.vfs.read(self.handle, offset, length)

    async def write(self, offset: int, buffer: ReadableBuffer) -> int:
        """Write all of `buffer` at `offset`; return the number of bytes. The client stores the bytes at
        the latest in `flush` or `close`, and an error in storing them is raised there. EDQUOT: the bytes
        exceed the quota of the volume; as many bytes as fit were taken."""
        content, offset = bytes_of(buffer), integer("offset", offset)
        with as_os_error(self.path):
            return await write_all(self.vfs, self.handle, offset, content)

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, or extend it with zeros."""
        size = size_of(size)
        with as_os_error(self.path):
            await self.vfs.setattr(self.handle.inode, size=size, caller=Caller(0, 0), handle=self.handle)

    async def punch(self, offset: int, length: int) -> None:
        """Punch a hole, durably: the range reads as zeros and occupies no space. The file size does not
        change."""
        offset, length = integer("offset", offset), integer("length", length)
        with as_os_error(self.path):
            await self.vfs.fallocate(self.handle, offset, length, PUNCH_HOLE | KEEP_SIZE)

    async def flush(self) -> None:
        """Store all written bytes and publish them. On return the stores have the bytes, and every later
        open sees them."""
        with as_os_error(self.path):
            await self.vfs.flush(self.handle)

    async def fsync(self) -> None:
        """Make all written bytes durable. On return they survive a power loss."""
        with as_os_error(self.path):
            await self.vfs.fsync(self.handle, False)

    async def stat(self) -> os.stat_result:
        """Attributes of the file, as os.fstat gives them."""
        with as_os_error(self.path):
            return stat_result(await self.vfs.getattr(self.handle.inode))

    async def close(self) -> None:
        """Flush and close the file. A second call does nothing. The file is closed even if the flush
        raises."""
        if self.handle.closed:
            return
        with as_os_error(self.path):
            try:
                await self.vfs.flush(self.handle)
            finally:
                await self.vfs.release(self.handle)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle the open file {self.path!r}; pickle the file system and the path, and open it again"
        )

    async def __aenter__(self) -> AsyncFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
