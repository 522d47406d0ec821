"""Late closes: the close of a new file completes before the stores and the shard have its data.

The shard has delegated the file to this client (`meta/sessions/lease_table`): before another client sees its
attributes, it recalls the lease, and this client stores and reports the data first. So close-to-open holds as if
the close had waited. The bytes are in the mount state, so they survive this process; a power loss before they are
stored loses the file's bytes, as with local file systems, unless it was synced.

A kernel's RELEASE waits until the data is reported (`Files.release`), so an open handle in the mount state stands
for each late close. An error that comes after the close is logged, and raised to the next program that opens the
file here for writing, when it writes, syncs or closes; while the stores refuse writes, and in a pool that is
nearly full, closes wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from nvpool.client.state.background_tasks import BackgroundTasks
from nvpool.client.state.dirty_file import DirtyFile
from nvpool.client.state.leases import Leases
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import StatFs
from nvpool.client.write.writeback import Writer
from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import NotFound, NvpoolError

log = logging.getLogger(__name__)

LATE_MAX = 32
"""Files whose close has completed early; beyond it closes wait. A quarter of the kernel's background requests."""
REFUSED_S = 10.0
"""Time after a failed write during which closes wait for the stores."""
ROOM_S = 5.0
"""Age at which the free space of the pool is asked for again; it is used for three times as long."""
ROOM_SHARE = 0.05
"""Share of the pool that must be free: in a fuller one a close waits, so that it can report ENOSPC."""
_ERRORS_MAX = 1024


class LateCloses:
    """The closes of one client that have completed and whose data is still being stored or reported."""

    def __init__(
        self,
        writer: Writer,
        leases: Leases,
        clock: Clock,
        tasks: BackgroundTasks,
        is_on: bool,
    ) -> None:
        self._writer = writer
        self._tasks = tasks
        self._leases = leases
        self._clock = clock
        self._is_on = is_on
        self._files: dict[int, OpenInode] = {}
        self._waits_until_s = 0.0
        self.errors: dict[int, NvpoolError] = {}
        """Inode -> error of its data after its close, until the next open of it here."""
        self._room: Callable[[], Awaitable[StatFs]] | None = None
        self._room_until_s = self._room_next_s = 0.0
        self._left: list[OpenInode] = []
        self._taken_over: asyncio.Future[None] | None = None

    def use_room(self, statfs: Callable[[], Awaitable[StatFs]]) -> None:
        """Have `statfs` asked for the sizes of the pool; before, no close completes late."""
        self._room = statfs

    def has_room(self) -> bool:
        """Whether the pool was last seen with enough free space. Asks again in the background where that is old."""
        now_s = self._clock.boottime_s()
        if now_s >= self._room_next_s and self._room is not None:
            self._room_next_s = now_s + ROOM_S
            self._tasks.start(self._ask_for_room(self._room))
        return now_s < self._room_until_s

    async def _ask_for_room(self, statfs: Callable[[], Awaitable[StatFs]]) -> None:
        try:
            sizes = await statfs()
        except NvpoolError:
            return
        has_room = sizes.blocks_available >= ROOM_SHARE * sizes.blocks_total
        self._room_until_s = self._clock.boottime_s() + 3 * ROOM_S if has_room else 0.0

    def begin(self, file: OpenInode, otherwise: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Begin to store and report the file's data; return whether the close may complete now.

        False: there was no side effect, and the close must wait. `otherwise` is the slow way of the same.
        """
        written = file.written
        if (
            not self._is_on
            or file.delegation is None
            or written is None
            or not self._may_begin(file, written)
        ):
            return False
        flush = self._writer.begin_flush(file, partial(self._ended, file), otherwise)
        if flush is None:
            return False
        if flush is not True:
            self._files[file.inode] = file
        return True

    def _may_begin(self, file: OpenInode, written: DirtyFile) -> bool:
        delegation, held = file.delegation, self._leases.held(file.inode)
        now_s = self._clock.boottime_s()
        return (
            held is not None
            and delegation is not None
            and held.number == delegation.number  # not recalled since
            and self._waits_until_s <= now_s < delegation.until_s
            and not file.attr.size  # by a truncation here
            and written.appended is None
            and written.met is None
            and len(self._files) < LATE_MAX
            and file.inode not in self._files
            and self.has_room()
        )

    def _ended(self, file: OpenInode, _: object, error: BaseException | None) -> None:
        self._files.pop(file.inode, None)
        if error is None or isinstance(error, NotFound | asyncio.CancelledError):
            return
        self._waits_until_s = self._clock.boottime_s() + REFUSED_S
        log.error("inode %d was closed, and its data cannot be stored: %s", file.inode, error)
        if isinstance(error, NvpoolError):
            self.errors[file.inode] = error
            for inode in too_old(self.errors, _ERRORS_MAX):
                del self.errors[inode]

    def opened(self, file: OpenInode) -> None:
        """Have a program that opened the file for writing meet the error of an earlier close."""
        if self.errors and (error := self.errors.pop(file.inode, None)) is not None:
            self._writer.meet(file, error)

    async def settle(self, inodes: list[int]) -> None:
        """Return when the data of these files is reported, or cannot be."""
        await self._settle([file for inode in inodes if (file := self._files.get(inode)) is not None])

    async def settle_if(self, is_wanted: Callable[[int], bool]) -> None:
        """As `settle`, for all files whose inode `is_wanted`, those of the previous process included."""
        if self._taken_over is not None:
            await asyncio.shield(self._taken_over)
        files = [*self._files.values(), *self._left]
        await self._settle([file for file in files if is_wanted(file.inode)])
        self._left = [file for file in self._left if not is_wanted(file.inode)]

    async def _settle(self, files: list[OpenInode]) -> None:
        await asyncio.gather(*map(self._settle_one, files))

    def begin_takeover(self) -> None:
        """Have `settle_if` wait until `end_takeover`, because the previous process may have completed closes late."""
        self._taken_over = asyncio.get_running_loop().create_future()

    def end_takeover(self, files: list[OpenInode]) -> None:
        """Take over the files that the previous process has written; their data is not reported yet."""
        self._left = files
        if self._taken_over is not None:
            self._taken_over.set_result(None)
            self._taken_over = None

    async def _settle_one(self, file: OpenInode) -> None:
        await self._writer.store(file)
        try:
            await self._writer.settle(file)
        except NvpoolError:
            pass  # `_ended` has it, or the release of the file
