"""Writes: at an offset or at the end, through the kernel's pages or past them.

A part of `fuse/ops/operations`. A write request carries the current flags of its descriptor, so a change of
O_APPEND or O_DIRECT by F_SETFL takes effect from the next write on. How pages are kept coherent with writes
that bypass them: `fuse/ops/page_cache_bypass`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import QuotaExceeded
from nvpool.fuse.ops.page_cache_bypass import PageCacheBypass, may_have_tail
from nvpool.fuse.ops.setid import SET_IDS, PrivilegeOps


class WriteOps(PrivilegeOps):
    _files: dict[int, Any]
    _appending: dict[int, Caller]
    _seen: dict[int, tuple[int, bool]]
    _paged: dict[int, tuple[float, bool]]
    change_count: int
    _paging: Callable[[int], None]
    flags_below: Callable[[int], int]
    pages: PageCacheBypass
    options: Any
    fsync: Any

    def write_now(self, handle: int, offset: int, buffer, drop_set_ids: Caller | None, unique: int) -> bool:
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
            if file.inode not in self._paged:
                self._paging(file.inode)
        self.change_count += 1
        return True

    def failed(self, inode: int) -> None:
        """Note a failed write: the kernel's pages have data that no store has."""
        self._seen.pop(inode, None)
        if self.options.writeback:
            self.pages.refuse(inode)

    def _there(self, inode: int) -> int:
        """The number by which the kernel knows a directory."""
        return inode

    def _forget_refused(self, inode: int) -> None:
        """Make the kernel drop a closed file that had refused data.

        Call this after a close; nothing happens while a descriptor is open.
        """
        if not self._vfs.is_open(inode):
            names = self._vfs.cache.names_of(inode)
            self.pages.forget_refused(inode, [(self._there(parent), name) for parent, name in names])

    @contextlib.contextmanager
    def _changing(self, file):
        try:
            yield
        except BaseException:
            self.failed(file.inode)
            raise
        finally:
            self.change_count += 1

    def has_pages(self, handle: int) -> bool:
        """Whether the kernel may have pages of the open file.

        It may, even though writes through this handle bypass pages.
        """
        file = self._files.get(handle)
        return file is not None and self.pages.has_pages(file)

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
        buffer,
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
            await self._drop_set_ids(file, drop_set_ids)
        flags = file.flags if flags is None else self.flags_below(flags)
        direct = handle in self._appending or bool(flags & os.O_DIRECT)
        with self._changing(file):
            if flags & os.O_APPEND:
                place, taken = await self._append(file, buffer, self._appending.get(handle)), len(buffer)
                if not direct and place != offset:
                    self.pages.moved(file.inode, min(place, offset))
            else:
                place, size = offset, file.size
                has_tail = offset > size and not self.options.writeback and may_have_tail(file)
                taken = await self._vfs.write(file, offset, buffer, False)
                if has_tail:
                    await self.pages.written_behind(file.inode, size, offset)
                if taken < len(buffer) and self.options.writeback:  # the kernel ignores a short write-back
                    raise QuotaExceeded(
                        "the volume's quota is used up: what was written back fits in part only"
                    )
            if direct:
                await self.pages.written(file, place, taken)
            if handle in self._appending and (syncs or file.flags & os.O_DSYNC):
                await self._vfs.fsync(file, False)
            return taken
