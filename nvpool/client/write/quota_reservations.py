"""Room in volumes with a quota: bytes are promised by the service before a write takes them, so that none is taken that would
not fit, and EDQUOT is told to the write itself.

A file outside of volumes is `paid` to no end, and costs a write one comparison. In a volume a write beyond what the file has
paid takes from what the volume's shard has promised this client; where that is not enough it is asked for, in slices. What is
promised and not needed is given back within two seconds after the last write that made a file longer, or with the session. The
service forgets promises when it starts anew and when a partition moves: then they are said again, before anybody is promised
anything new. Owned by `vfs/client`; used by the operations that make files longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.attr_cache import OpenInode
from nvpool.core.clock import Clock
from nvpool.core.errors import NotFound, NvpoolError, QuotaExceeded
from nvpool.core.units import MIB, format_bytes
from nvpool.rpc.v1 import meta_pb2, wire_pb2

AHEAD_BYTES = 64 * MIB
"""Asked for beyond what is needed: so that a writer of 1 GB/s asks some fifteen times a second. The service gives less where
the volume is nearly full."""
IDLE_S = 0.5
UNLIMITED_BYTES = 1 << 62
log = logging.getLogger(__name__)


class Room:
    """What this client is promised in one volume."""

    __slots__ = ("volume", "free", "taken", "files", "used_s", "until_s", "asking", "limit",
                 "told")

    def __init__(self, volume: int) -> None:
        self.volume = volume
        self.free = 0
        """Promised, and taken by no file yet."""
        self.taken = 0
        """By files, ever."""
        self.files: dict[int, OpenInode] = {}
        self.used_s = 0.0
        self.until_s = 0.0
        """Until when a volume without a quota is believed to have none."""
        self.asking = asyncio.Lock()
        self.limit = 0
        self.told = 0
        """Bytes that we are promised and that files had taken, as the service knows it: what it was told last, and what files
        have taken since of what it promised us. Of these what was counted already, or has been since, we may be promised twice,
        and what no file has any more is promised in vain. Unlimited while an answer has not come."""

    def outstanding(self) -> int:
        """Taken by files, and not known to the service as their size."""
        return sum(max(0, file.paid - file.attr.size) for file in self.files.values())


class Rooms:
    def __init__(self, meta: MetaClient, clock: Clock) -> None:
        self._meta = meta
        self._clock = clock
        self._rooms: dict[int, Room] = {}
        self._shards: dict[int, int] = {}
        self._tasks: set[asyncio.Task] = set()

    # -- taking --------------------------------------------------------------------------------------------------------

    def cover(self, file: OpenInode, end: int) -> bool:
        """Whether the file may end there: what it takes is the file's then. Never waits; where not, ask `have`."""
        need = end - max(file.paid, file.attr.size)
        room = self._rooms.get(file.volume)
        if need > 0:
            now_s = self._clock.boottime_s()
            if room is None or room.free < need or (room.until_s and room.until_s < now_s):
                return False
            room.free -= need
            room.taken += need
            if not room.until_s:
                room.told += need
            room.used_s = now_s
            room.files[file.inode] = file
        file.paid = max(file.paid, end, file.attr.size)
        return True

    async def have(self, file: OpenInode, offset: int, end: int) -> int:
        """Up to where a write of [offset, end) may go: to its end, or less where the volume is full before that. QuotaExceeded
        where nothing of it fits. Errors as MetaClient.ask."""
        if end <= file.paid or self.cover(file, end):
            return end
        async with self._alone(file.volume) as room:
            for last in (False, True):
                if self.cover(file, end):
                    return end
                await self._ask(room, end - max(file.paid, file.attr.size), AHEAD_BYTES)
                if self.cover(file, end):
                    return end
                if not last:
                    await self._wait_for_reports(room)
            reached = max(file.paid, file.attr.size) + room.free
            if reached <= offset:
                raise QuotaExceeded(f"the volume's quota of {format_bytes(room.limit)} is used up; remove files and "
                                    f"purge its trash, if it has one (nvpool trash purge POOL NAME), or: nvpool volume "
                                    "resize POOL NAME --size SIZE")
            self.cover(file, reached)
            return reached

    @contextlib.asynccontextmanager
    async def _alone(self, volume: int) -> AsyncIterator[Room]:
        """The only one who asks for the volume. Its room may have been forgotten while one waited: then it is another one."""
        while True:
            room = self._rooms.get(volume)
            if room is None:
                room = self._rooms[volume] = Room(volume)
            async with room.asking:
                if self._rooms.get(volume) is room:
                    yield room
                    return

    async def _wait_for_reports(self, room: Room) -> None:
        """What is on its way to be counted is, and what was removed and closed is not any more."""
        for file in list(room.files.values()):
            if file.written is not None and file.written.reporting.taken:
                async with file.written.reporting:
                    pass
        await self._meta.release_now(room.volume)

    async def _ask(self, room: Room, needed: int, ahead: int, again: bool = False) -> None:
        """Have `needed` bytes promised beside what files have taken, and some more."""
        taken, outstanding = room.taken, room.outstanding()
        wanted = outstanding + max(0, needed)
        request = meta_pb2.VolumeRoomRequest(inode=room.volume, bytes=wanted + ahead, needed=wanted, again=again)
        room.told, room.used_s = UNLIMITED_BYTES, self._clock.boottime_s()
        reply = await self._meta.ask(room.volume, wire_pb2.META_VOLUME_ROOM, request, meta_pb2.VolumeRoomReply)
        self._shards[room.volume] = self._meta.shard_of(room.volume)
        now_s = self._clock.boottime_s()
        room.used_s, room.limit, room.told = now_s, reply.bytes_max, outstanding
        if reply.unlimited:
            room.free, room.until_s = UNLIMITED_BYTES, now_s + reply.life_ms / 1000
        else:
            room.told += room.taken - taken
            room.free, room.until_s = max(0, reply.bytes - room.told), 0.0

    async def repeat(self, file: OpenInode | None, volume: int, work: Callable[[], Awaitable], settle: Callable[[], Awaitable]):
        """What `work` returns, which makes a file longer by a change of the service's own. Refused, it is done once more when
        what this client holds in advance was given back, and its own writes are counted."""
        try:
            return await work()
        except QuotaExceeded:
            room = self._rooms.get(volume)
            if room is None and file is None:
                raise
        await settle()
        if room is not None:
            await self._wait_for_reports(room)
            await self._give_back(room)
        else:
            await self._meta.release_now(volume)
        return await work()

    # -- giving back, and saying again ---------------------------------------------------------------------------------

    def drop(self, file: OpenInode) -> None:
        """The file is closed, and all that was written to it is known or given up."""
        room = self._rooms.get(file.volume)
        if room is not None and room.files.get(file.inode) is file:
            del room.files[file.inode]  # what is free stays for the next file, for a while

    def run_once(self) -> None:
        """Give back what was promised and is not used."""
        idle_s = self._clock.boottime_s() - IDLE_S
        for room in list(self._rooms.values()):
            if room.asking.locked():
                continue
            if self._is_over(room):
                self._forget(room)
            elif ((room.free and not room.until_s) or room.outstanding() < room.told) and room.used_s < idle_s:
                self._behind(self._give_back_quietly(room))

    async def _give_back(self, room: Room) -> None:
        async with room.asking:
            if self._rooms.get(room.volume) is room:
                await self._ask(room, 0, 0)

    async def _give_back_quietly(self, room: Room) -> None:
        """What fails is given back a second later, or with the session."""
        try:
            await self._give_back(room)
            if self._is_over(room):
                self._forget(room)
        except NotFound:
            self._forget(room)
        except NvpoolError as error:
            log.debug("what was promised in volume %d is given back later: %s", room.volume, error)

    @staticmethod
    def _is_over(room: Room) -> bool:
        """Nothing is promised, and nobody asks for it."""
        return not (room.files or room.told or room.asking.locked()) and (bool(room.until_s) or not room.free)

    def _forget(self, room: Room) -> None:
        if self._rooms.get(room.volume) is room:
            del self._rooms[room.volume]
            self._shards.pop(room.volume, None)

    def shard_restarted(self, shard: int) -> None:
        """It does not know what it has promised us, nor does one that has lost our session."""
        for room in self._rooms.values():
            if self._meta.shard_of(room.volume) == shard:
                self._behind(self._say_again(room))

    def map_changed(self, *_) -> None:
        for volume, shard in self._shards.items():
            if volume in self._rooms and self._meta.shard_of(volume) != shard:
                self._behind(self._say_again(self._rooms[volume]))

    def take_over(self, file: OpenInode) -> None:
        """The process before us has written the file as far as it is known here; it was promised that."""
        if not file.volume or file.written is None:
            return
        file.paid = max(file.attr.size, file.written.end)
        room = self._rooms.get(file.volume)
        if room is None:
            room = self._rooms[file.volume] = Room(file.volume)
            self._behind(self._say_again(room))
        room.files[file.inode] = file

    async def _say_again(self, room: Room) -> None:
        try:
            async with room.asking:
                if self._rooms.get(room.volume) is room:
                    await self._ask(room, 0 if room.until_s else room.free, 0, again=True)
        except NvpoolError as error:
            log.info("what was promised in volume %d is not known to be so any more: %s", room.volume, error)
            room.free = 0

    def _behind(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

