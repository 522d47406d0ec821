"""Writes through open files, and their close, as far as they need no wait and no task.

The coroutines of client/vfs/files do the same for what has to wait: for quota, for buffer space, for a lock. Used
by the front ends, which call them first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import FileHandle
from nvpool.client.write.writeback import Writer
from nvpool.core.units import CHUNK_BYTES_MIN
from nvpool.poolmap.file_layout import check_range, layout_of, size_max

if TYPE_CHECKING:
    from nvpool.client.rpc.change_fast_path import OnEnd
    from nvpool.client.write.late_closes import LateCloses
    from nvpool.client.write.quota_reservations import QuotaReservations
    from nvpool.client.write.sender import CloseFlush

_RANGE_MAX = size_max(layout_of(CHUNK_BYTES_MIN))
"""Size that a file of any layout may have."""


class HandleWrites:
    """Writes and closes of open files that need no wait.

    `changed(file)` drops what was read ahead of the file. `lock_owners` has the inodes on which owners on this
    client have locks. `flush_writes(handle)` makes the coroutine of a flush that has to wait.
    """

    def __init__(
        self,
        writer: Writer,
        changed: Callable[[OpenInode], None],
        rooms: QuotaReservations,
        lock_owners: dict[int, Any],
        flush_writes: Callable[[FileHandle], Coroutine[Any, Any, None]],
        late_closes: LateCloses,
    ) -> None:
        self._writer = writer
        self._changed = changed
        self._rooms = rooms
        self._lock_owners = lock_owners
        self._flush_writes = flush_writes
        self._late_closes = late_closes

    def write_now(self, handle: FileHandle, offset: int, buffer: Any, unique: int = 0) -> bool:
        """As Files.write, without waiting; return whether `buffer` was accepted.

        False: there was no side effect, and the caller must await `write`. `unique`: the number of the
        kernel's request, if there is one.
        """
        file = handle.file
        length = len(buffer)
        if not handle.writable or handle.append or handle.closed or file.lost or not length:
            return False
        if offset < 0 or offset + length > _RANGE_MAX:
            check_range(file.layout, offset, length)
        if offset + length > file.paid and not self._rooms.cover(file, offset + length):
            return False
        if not self._writer.write_now(file, offset, buffer, unique):
            return False
        self._changed(file)  # the bytes are already being sent; no read can have run in between
        return True

    def is_flushed(self, handle: FileHandle) -> bool:
        """Whether `flush` has nothing to do for any lock owner: no written data and no locks."""
        file = handle.file
        return file.written is None and not file.lost and file.inode not in self._lock_owners

    def begin_flush(self, handle: FileHandle, on_end: OnEnd) -> CloseFlush | bool | None:
        """Submit `flush` without a task; `on_end(None, error)` is called when it ends.

        Returns an object with `cancel`. True: there is nothing to wait for, or a late close has begun. None: there
        was no side effect, and the caller must await `flush`, for example because the file has locks.
        """
        file = handle.file
        if file.lost or file.inode in self._lock_owners:
            return None
        if file.written is None or self._late_closes.begin(file, partial(self._flush_writes, handle)):
            return True
        return self._writer.begin_flush(file, on_end, partial(self._flush_writes, handle))
