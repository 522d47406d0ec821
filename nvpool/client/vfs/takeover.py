"""Takeover of a mount by a new process: sessions, open files, locks and unstored writes.

The previous process was killed, or was replaced by newer code. Its caches of names and attributes and its
leases ended with it, so the new process starts with empty caches and fetches everything again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import FileHandle
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.files import rights_of
from nvpool.client.vfs.locks import FileLocks, LockKey
from nvpool.core.errors import NotFound, NvpoolError, Unavailable
from nvpool.core.ids import LIFE_BITS
from nvpool.core.posix.byte_range_locks import laid
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.shm.mount_state import Word

log = logging.getLogger(__name__)

_QUERIES_IN_PARALLEL = 64
_LOST_CHUNK_BITS = 20


class PredecessorFile(NamedTuple):
    """A file that was open in the previous process."""

    number: int
    inode: int
    flags: int


class Takeover:
    """The takeover of a previous process's open files, locks and writes."""

    def __init__(self, parts: ClientParts, locks: FileLocks) -> None:
        self._clock = parts.clock
        self._kept = parts.kept
        self._keeping = parts.keeping
        self._late_closes = parts.late_closes
        self._meta = parts.meta
        self._cache = parts.cache
        self._chunks = parts.chunks
        self._writer = parts.writer
        self._rooms = parts.rooms
        self._inodes = parts.inodes
        self._locks = locks

    async def take_over(self, opened: Iterable[PredecessorFile]) -> dict[int, FileHandle]:
        """Open the previous process's files again; return the handles by number.

        The handle of a file that is gone, or whose shard did not answer before the deadline, answers LockLost
        (EIO); so does a file that held locks in a session that has ended meanwhile.

        Called once, before any other operation of this client. Waits for the metadata service.
        """
        written: list[OpenInode] = []
        self._late_closes.begin_takeover()
        try:
            return await self._take_over(opened, written)
        finally:
            self._late_closes.end_takeover(written)

    async def _take_over(
        self, opened: Iterable[PredecessorFile], written: list[OpenInode]
    ) -> dict[int, FileHandle]:
        memory, opened = self._kept, list(opened)
        life = memory.word(Word.LIVES) + 1
        memory.set_word(Word.LIVES, life)
        # Greater than the numbers of earlier processes, whose session continues: otherwise stores would take
        # our requests for replays.
        self._chunks.sequence = life << LIFE_BITS
        self._writer.flushes_all(bool(memory.word(Word.UNSTABLE)))
        left = self._keeping.left()
        rights: dict[int, int] = {}
        for before in opened:
            rights[before.inode] = rights.get(before.inode, 0) | rights_of(before.flags)
        for inode in left:
            rights.setdefault(inode, 3)
        self._meta.take_over(list(rights))
        gate = asyncio.Semaphore(_QUERIES_IN_PARALLEL)
        found = dict(
            await asyncio.gather(*(self._hold_again(gate, inode, wanted) for inode, wanted in rights.items()))
        )
        handles = {}
        for before in opened:
            file = found[before.inode]
            file.handles += 1
            handle = handles[before.number] = FileHandle(file, before.flags)
            handle.number = before.number
        await self._take_over_locks(handles)
        for inode, kept in left.items():
            file = found[inode]
            if not file.lost:
                self._writer.take_over(file, kept)
                written.append(file)
                self._rooms.take_over(file)
            elif kept.pieces or kept.stored_end:
                log.error(
                    "%d writes to inode %d are dropped: it is gone, or cannot be asked for",
                    len(kept.pieces),
                    inode,
                )
                self._drop_left(kept)
        return handles

    async def _hold_again(self, gate: asyncio.Semaphore, inode: int, rights: int) -> tuple[int, OpenInode]:
        request = meta_pb2.GetAttrRequest(inode=inode, rights=rights)
        try:
            async with gate:
                sent_s = self._clock.boottime_s()
                entry = await self._meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        except NvpoolError as error:
            log.error("inode %d was open and cannot be used any more: %s", inode, error)
            file = OpenInode(Attr(inode=inode, chunk_bits=_LOST_CHUNK_BITS))
            file.lost = True
            if not isinstance(error, (NotFound, Unavailable)):
                raise
            return inode, file
        file = OpenInode(entry.attr)
        file.opened = 1
        self._cache.open[inode] = file
        self._cache.put_attr(entry.attr)
        file.adopt_grant(entry.grant, self._clock.wall_ns() // 1_000_000)
        self._inodes.take_lease(entry, sent_s)
        return inode, file

    async def _take_over_locks(self, handles: dict[int, FileHandle]) -> None:
        """Restore the locks that the service records for this client's owners."""
        memory = self._kept
        keys: dict[LockKey, list[tuple[int, int]]] = {}
        for index, inode, owner, number, kind in memory.locks.valid():
            keys.setdefault(LockKey(inode, kind, owner), []).append((index, number))
        held = {inode: await self._locks_of(inode) for inode in {key.inode for key in keys}}
        for key, records in keys.items():
            locks = held[key.inode]
            spans = [
                lock
                for lock in locks or ()
                if (lock.kind, lock.owner) == (key.kind, key.owner) and not lock.waits
            ]
            owned = self._locks.add_owner(key) if spans else None
            for index, number in records:
                handle = handles.get(number)
                if owned is not None and handle is not None:
                    owned.kept.append(index)
                    owned.handles.add(handle)
                else:
                    memory.locks.give_back(index)
            for lock in spans:
                laid(owned.spans, lock.start, lock.end, lock.mode, lock.pid).apply(owned.spans)
            file = self._cache.open.get(key.inode)
            if locks is None and file is not None:
                file.lost = True

    async def _locks_of(self, inode: int) -> list[meta_pb2.HeldLock] | None:
        """This client's locks on the inode. None if they ended with the session, or cannot be determined."""
        request = meta_pb2.LocksRequest(inode=inode)
        try:
            reply = await self._meta.ask(inode, wire_pb2.META_LOCKS, request, meta_pb2.LocksReply)
        except NotFound:
            return []
        except NvpoolError as error:
            log.error("the locks held on inode %d cannot be determined: %s", inode, error)
            return None
        if not self._meta.was_taken_up(inode):
            return None
        if reply.more:
            log.error(
                "inode %d has more locks than one reply lists: it is not known which of them are ours", inode
            )
            return None
        return [lock for lock in reply.locks if lock.session == request.session]

    def _drop_left(self, kept) -> None:
        self._keeping.drop([piece.record for piece in kept.pieces])
        if kept.entry >= 0:
            self._kept.files.give_back(kept.entry)
