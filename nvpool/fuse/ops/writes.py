"""Writes: at an offset or at the end, through the kernel's pages or past them.

A part of `fuse/ops/operations`. A write request carries the current flags of its descriptor, so a change of
O_APPEND or O_DIRECT by F_SETFL takes effect from the next write on. How pages are kept coherent with writes
that bypass them: `fuse/ops/kernel_cache/page_cache_bypass`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import InvalidRequest, QuotaExceeded
from nvpool.fuse.ops.inline_completions import SubmittedFlush
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import PageCacheBypass, may_have_tail
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.open_files import OpenFiles
from nvpool.fuse.ops.setid import SET_IDS, Privileges
from nvpool.rpc.api import Buffer


@contextlib.contextmanager
def _changing(changes: ChangeCount, failed: Callable[[int], None], inode: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed(inode)
        raise
    finally:
        changes.count += 1


class FileWrites:
    """Writes into open files, and what makes them durable."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions,
        files: OpenFiles,
        changes: ChangeCount,
        pages: CachedPages,
        bypass: PageCacheBypass,
        privileges: Privileges,
    ) -> None:
        self._vfs = vfs
        self._options = options
        self._files = files.by_handle
        self._appending = files.appending
        self._changes = changes
        self._pages = pages
        self._bypass = bypass
        self._privileges = privileges

    def write_now(
        self, handle: int, offset: int, buffer: Buffer, drop_set_ids: Caller | None, unique: int
    ) -> bool:
        """Write `buffer` as `write` does, if that needs no waiting. False: nothing was taken.

        If written data is kept in the mount state (`kept`), `buffer` was copied on return.
        """
        file = self._files[handle]
        if (drop_set_ids is not None and file.attr.mode & SET_IDS) or (
            offset and offset > file.size and may_have_tail(file)
        ):
            return False
        try:
            if not self._vfs.write_now(file, offset, buffer, unique):
                return False
        except BaseException:
            self.failed(file.inode)
            raise
        finally:
            if file.inode not in self._pages.paged:
                self._pages.paging(file.inode)
        self._changes.count += 1
        return True

    def failed(self, inode: int) -> None:
        """Note a failed write: the kernel's pages have data that no store has."""
        self._pages.seen.pop(inode, None)
        if self._options.writeback:
            self._bypass.refuse(inode)

    def syncs_itself(self, handle: int) -> bool:
        """Whether O_SYNC and O_DSYNC must be carried out here.

        The kernel sends no FSYNC after a write that bypasses its pages.
        """
        return handle in self._appending

    async def synced(self, handle: int, taken: int) -> int:
        """Return `taken` once the written data is durable."""
        await self.fsync(handle, False)
        return taken

    async def write(
        self,
        handle: int,
        offset: int,
        buffer: Buffer,
        drop_set_ids: Caller | None = None,
        syncs: bool = False,
        flags: int | None = None,
    ) -> int:
        """Write all of `buffer`, or raise. The buffer must not change until the file is flushed.

        `drop_set_ids`: the writer, if it may not leave set-id bits on the file. `syncs`: make the data
        durable too, if `syncs_itself`. `flags`: the current ones of the descriptor, which fcntl(2) may have
        changed; None: those of the open.
        """
        file = self._files[handle]
        if drop_set_ids is not None and file.attr.mode & SET_IDS:
            await self._privileges.drop_set_ids(file, drop_set_ids)
        flags = file.flags if flags is None else self._options.flags_below(flags)
        direct = handle in self._appending or bool(flags & os.O_DIRECT)
        with _changing(self._changes, self.failed, file.inode):
            if flags & os.O_APPEND:
                place, taken = (
                    await self._privileges.append(file, buffer, self._appending.get(handle)),
                    len(buffer),
                )
                if not direct and place != offset:
                    self._bypass.moved(file.inode, min(place, offset))
            else:
                place, size = offset, file.size
                has_tail = offset > size and not self._options.writeback and may_have_tail(file)
                taken = await self._vfs.write(file, offset, buffer, False)
                if has_tail:
                    await self._bypass.written_behind(file.inode, size, offset)
                if taken < len(buffer) and self._options.writeback:  # the kernel ignores a short write-back
                    raise QuotaExceeded(
                        "the volume's quota is used up: what was written back fits in part only"
                    )
            if direct:
                await self._bypass.written(file, place, taken)
            if handle in self._appending and (syncs or file.flags & os.O_DSYNC):
                await self._vfs.fsync(file, False)
            return taken

    def begin_flush(self, handle: int) -> SubmittedFlush | bool | None:
        """Start `flush`, as `begin_create` does.

        True: nothing is left to flush. Only for a caller without locks.
        """
        file = self._files[handle]
        if self._vfs.is_flushed(file):
            return True
        ending = SubmittedFlush(self._changes, self.failed, file.inode)
        begun = ending.begun = self._vfs.begin_flush(file, ending.ended)
        if begun is None or begun is True:
            return begun
        return ending

    async def flush(self, handle: int, owner: int | None = None) -> None:
        """close(2): on return the stores have all written data, and the size is known to all clients.

        Raises the error of an earlier write if there was one. The record locks of `owner` on the file end.
        """
        file = self._files[handle]
        with _changing(self._changes, self.failed, file.inode):
            await self._vfs.flush(file, owner)

    async def fsync(self, handle: int, datasync: bool) -> None:
        """Make the written data durable, and unless `datasync` the attributes too."""
        file = self._files[handle]
        with _changing(self._changes, self.failed, file.inode):
            await self._vfs.fsync(file, datasync)

    async def fallocate(self, handle: int, offset: int, length: int, mode: int, caller: Caller) -> None:
        """Allocate space or punch a hole; `mode` as in fallocate(2).

        The kernel writes back the pages of a hole before and drops them after, and queries the attributes
        again.
        """
        file = self._files[handle]
        try:
            await self._privileges.take(file, caller)
            size = file.size
            await self._vfs.fallocate(file, offset, length, mode)
            if file.size > size and not self._options.writeback:
                await self._bypass.growing(file.inode, size, file.size)
        finally:
            self._changes.count += 1

    async def copy_file_range(
        self,
        handle_in: int,
        offset_in: int,
        handle_out: int,
        offset_out: int,
        length: int,
        flags: int,
        caller: Caller,
    ) -> int:
        """Copy a range; returns the number of bytes copied.

        The kernel has written back its pages of both ranges, and drops those of the second.
        """
        if flags:
            raise InvalidRequest(f"copy_file_range with flags {flags:#x}")
        file = self._files[handle_out]
        try:
            await self._privileges.take(file, caller)
            size = file.size
            copied: int = await self._vfs.copy_range(
                self._files[handle_in], offset_in, file, offset_out, length
            )
            if offset_out > size and not self._options.writeback:
                await self._bypass.growing(file.inode, size, offset_out)
            return copied
        finally:
            self._changes.count += 1
