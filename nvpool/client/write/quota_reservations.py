"""Quota reservations: bytes that the metadata service reserves before a write uses them.

So no write is accepted that does not fit into its volume, and EDQUOT is returned by the write itself.

A file outside volumes has an unlimited reservation (`paid`), so a write to it costs one comparison. In a
volume, a write beyond the file's reservation takes from the client's reservation at the volume's shard; if
that is too small, the client asks for more, in slices. Unused reservations are released within two seconds
after the last write that made a file longer, or with the session. The service forgets reservations when it
restarts and when a partition moves: then each client reports its reservations again, before the service
grants new ones. Owned by `vfs/client_parts`; used by the operations that make files longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core.clock import Clock
from nvpool.core.errors import NotFound, NvpoolError, QuotaExceeded
from nvpool.core.units import MIB, format_bytes
from nvpool.rpc.v1 import meta_pb2, wire_pb2

AHEAD_BYTES = 64 * MIB
"""Bytes requested beyond the need. A writer of 1 GB/s thus asks about fifteen times a second.

The service grants less if the volume is nearly full.
"""
IDLE_S = 0.5
UNLIMITED_BYTES = 1 << 62
log = logging.getLogger(__name__)


class VolumeReservation:
    """This client's reservation in one volume."""

    __slots__ = ("volume", "free", "taken", "files", "used_s", "until_s", "asking", "limit", "reported")

    def __init__(self, volume: int) -> None:
        self.volume = volume
        self.free = 0
        """Reserved bytes that no file has taken yet."""
        self.taken = 0
        """Total of bytes that files have ever taken."""
        self.files: dict[int, OpenInode] = {}
        self.used_s = 0.0
        self.until_s = 0.0
        """Time until which the client assumes that the volume has no quota."""
        self.asking = asyncio.Lock()
        self.limit = 0
        self.reported = 0
        """Reserved bytes that files had taken, as the service knows them.

        That is the last reported number plus the bytes that files have taken since from the service's grants.
        Of these bytes, those that the service has counted in file sizes already are reserved twice, and those
        that no file has any more are reserved in vain. Unlimited while a reply is pending.
        """

    def outstanding(self) -> int:
        """Bytes that files have taken and that the service does not know as their size yet."""
        return sum(max(0, file.paid - file.attr.size) for file in self.files.values())


class QuotaReservations:
    """The quota reservations of a client in all volumes."""

    def __init__(self, meta: MetaClient, clock: Clock) -> None:
        self._meta = meta
        self._clock = clock
        self.reservations: dict[int, VolumeReservation] = {}
        self._shards: dict[int, int] = {}
        self._tasks: set[asyncio.Task] = set()

    # -- taking --------------------------------------------------------------------------------------------------------

    def cover(self, file: OpenInode, end: int) -> bool:
        """Reserve up to `end` for the file from the present reservation. Return whether that was possible.

        Never waits. False: the caller must await `have`.
        """
        need = end - max(file.paid, file.attr.size)
        room = self.reservations.get(file.volume)
        if need > 0:
            now_s = self._clock.boottime_s()
            if room is None or room.free < need or (room.until_s and room.until_s < now_s):
                return False
            room.free -= need
            room.taken += need
            if not room.until_s:
                room.reported += need
            room.used_s = now_s
            room.files[file.inode] = file
        file.paid = max(file.paid, end, file.attr.size)
        return True

    async def have(self, file: OpenInode, offset: int, end: int) -> int:
        """Reserve quota for a write of [offset, end). Return the end up to which it may go.

        The result is less than `end` if the volume is full before that. QuotaExceeded: nothing fits. Other
        errors as MetaClient.ask.
        """
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
                raise QuotaExceeded(
                    f"the volume's quota of {format_bytes(room.limit)} is used up; remove files and "
                    f"purge its trash, if it has one (nvpool trash purge POOL NAME), or: nvpool volume "
                    "resize POOL NAME --size SIZE"
                )
            self.cover(file, reached)
            return reached

    @contextlib.asynccontextmanager
    async def _alone(self, volume: int) -> AsyncIterator[VolumeReservation]:
        """Hold the lock of the volume's reservation. Only one task at a time asks the service for it.

        The reservation object may be replaced while a task waits; then the task locks the new one.
        """
        while True:
            room = self.reservations.get(volume)
            if room is None:
                room = self.reservations[volume] = VolumeReservation(volume)
            async with room.asking:
                if self.reservations.get(volume) is room:
                    yield room
                    return

    async def _wait_for_reports(self, room: VolumeReservation) -> None:
        """Wait for reports in flight, and for the release of removed and closed files."""
        for file in list(room.files.values()):
            if file.written is not None and file.written.reporting.taken:
                async with file.written.reporting:
                    pass
        await self._meta.release_now(room.volume)

    async def _ask(self, room: VolumeReservation, needed: int, ahead: int, again: bool = False) -> None:
        """Reserve `needed` bytes besides those that files have taken, and `ahead` more if possible."""
        taken, outstanding = room.taken, room.outstanding()
        wanted = outstanding + max(0, needed)
        request = meta_pb2.VolumeRoomRequest(
            inode=room.volume, bytes=wanted + ahead, needed=wanted, again=again
        )
        room.reported, room.used_s = UNLIMITED_BYTES, self._clock.boottime_s()
        reply = await self._meta.ask(
            room.volume, wire_pb2.META_VOLUME_ROOM, request, meta_pb2.VolumeRoomReply
        )
        self._shards[room.volume] = self._meta.shard_of(room.volume)
        now_s = self._clock.boottime_s()
        room.used_s, room.limit, room.reported = now_s, reply.bytes_max, outstanding
        if reply.unlimited:
            room.free, room.until_s = UNLIMITED_BYTES, now_s + reply.life_ms / 1000
        else:
            room.reported += room.taken - taken
            room.free, room.until_s = max(0, reply.bytes - room.reported), 0.0

    async def repeat(
        self,
        file: OpenInode | None,
        volume: int,
        work: Callable[[], Awaitable],
        settle: Callable[[], Awaitable],
    ):
        """Await `work`, a change by the service that makes a file longer, and return its result.

        If the service refuses it for the quota, it is repeated once, after this client's unused reservation
        was released and its own writes were reported by `settle`.
        """
        try:
            return await work()
        except QuotaExceeded:
            room = self.reservations.get(volume)
            if room is None and file is None:
                raise
        await settle()
        if room is not None:
            await self._wait_for_reports(room)
            await self._give_back(room)
        else:
            await self._meta.release_now(volume)
        return await work()

    # -- releasing, and reporting again --------------------------------------------------------------------------------

    def drop(self, file: OpenInode) -> None:
        """Forget a closed file, all of whose writes are reported or given up."""
        room = self.reservations.get(file.volume)
        if room is not None and room.files.get(file.inode) is file:
            del room.files[file.inode]  # the unused reservation stays for the next file, for a while

    def run_once(self) -> None:
        """Release reservations that are not used."""
        idle_s = self._clock.boottime_s() - IDLE_S
        for room in list(self.reservations.values()):
            if room.asking.locked():
                continue
            if self._is_over(room):
                self._forget(room)
            elif (
                (room.free and not room.until_s) or room.outstanding() < room.reported
            ) and room.used_s < idle_s:
                self._behind(self._give_back_quietly(room))

    async def _give_back(self, room: VolumeReservation) -> None:
        async with room.asking:
            if self.reservations.get(room.volume) is room:
                await self._ask(room, 0, 0)

    async def _give_back_quietly(self, room: VolumeReservation) -> None:
        """Release the unused reservation. After a failure a later call or the session's end does it."""
        try:
            await self._give_back(room)
            if self._is_over(room):
                self._forget(room)
        except NotFound:
            self._forget(room)
        except NvpoolError as error:
            log.debug("what was promised in volume %d is given back later: %s", room.volume, error)

    @staticmethod
    def _is_over(room: VolumeReservation) -> bool:
        """Whether nothing is reserved and no task uses the reservation."""
        return not (room.files or room.reported or room.asking.locked()) and (
            bool(room.until_s) or not room.free
        )

    def _forget(self, room: VolumeReservation) -> None:
        if self.reservations.get(room.volume) is room:
            del self.reservations[room.volume]
            self._shards.pop(room.volume, None)

    def shard_restarted(self, shard: int) -> None:
        """Report the reservations to a shard that has restarted or has lost our session."""
        for room in self.reservations.values():
            if self._meta.shard_of(room.volume) == shard:
                self._behind(self._say_again(room))

    def map_changed(self, *_) -> None:
        for volume, shard in self._shards.items():
            if volume in self.reservations and self._meta.shard_of(volume) != shard:
                self._behind(self._say_again(self.reservations[volume]))

    def take_over(self, file: OpenInode) -> None:
        """Adopt the reservation for the bytes that the previous process wrote to the file."""
        if not file.volume or file.written is None:
            return
        file.paid = max(file.attr.size, file.written.end)
        room = self.reservations.get(file.volume)
        if room is None:
            room = self.reservations[file.volume] = VolumeReservation(file.volume)
            self._behind(self._say_again(room))
        room.files[file.inode] = file

    async def _say_again(self, room: VolumeReservation) -> None:
        try:
            async with room.asking:
                if self.reservations.get(room.volume) is room:
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
