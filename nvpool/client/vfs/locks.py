"""Locks of fcntl(2) and flock(2) that hold between clients, managed by the metadata service.

Locks give consistency: a client that acquires a lock sees all writes of the last holder. Before a release,
the data written under the lock is at the stores and its size is reported.

This module records the granted locks of each owner, for three purposes: a close releases them, an interrupted
request leaves nothing behind, and the loss of a session marks the files of its locks as lost. A lost file
answers LockLost from then on, and none of its written data is sent any more.

Lock requests of one owner on one file run one at a time and to their end. If the caller is interrupted, the
caller returns immediately, and a background task undoes the request. Waiting for a lock is in
client/rpc/blocking_locks. An owner is a number that the caller chooses within this client: the kernel's lock owner,
for a mount.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import NamedTuple

from nvpool.client.rpc.blocking_locks import LockTurns
from nvpool.client.state.background_tasks import BackgroundTasks
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import FileHandle
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.core.errors import BadHandle, InvalidRequest, LockLost, NotFound, NvpoolError, WouldBlock
from nvpool.core.posix.byte_range_locks import (
    EXCLUSIVE,
    LAST_BYTE,
    RECORD,
    SHARED,
    UNLOCKED,
    WHOLE,
    LockRange,
    laid,
    weaker,
)
from nvpool.rpc.v1 import meta_pb2, wire_pb2

log = logging.getLogger(__name__)


class LockKey(NamedTuple):
    """The key of an owner's locks on a file; `kind` is RECORD (fcntl) or WHOLE (flock)."""

    inode: int
    kind: int
    owner: int


class OwnedLocks:
    """The locks of one kind that an owner has on a file."""

    __slots__ = ("spans", "handles", "asking", "doubtful", "kept")

    def __init__(self) -> None:
        self.spans: list[LockRange] = []
        self.handles: set[FileHandle] = set()  # through which the locks were acquired
        self.asking = asyncio.Lock()
        self.doubtful: list[tuple[int, int, int]] = []
        """(start, end, mode): ranges where the service may record a stronger lock than the owner has.

        To be corrected at the service.
        """
        self.kept: list[int] = []
        """Records of the handles in the mount state, which outlives this process."""


class FileLocks:
    """The lock operations, and the granted locks of each owner."""

    def __init__(self, parts: ClientParts) -> None:
        self._kept = parts.kept
        self._callbacks = parts.callbacks
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._reader = parts.reader
        self._writer = parts.writer
        self._rooms = parts.rooms
        self._unreported = parts.unreported
        self.owned: dict[LockKey, OwnedLocks] = {}
        self.owners: Counter[int] = Counter()
        """Inode -> number of owners on this client with locks on it."""
        self._background = BackgroundTasks()
        self._turns = LockTurns(parts.meta)
        parts.events.session_lost.append(self.session_lost)

    def is_locked(self, inode: int) -> bool:
        """Whether an owner on this client has locks on the file."""
        return inode in self.owners

    # -- public operations ---------------------------------------------------------------------------------------------

    async def getlk(
        self, handle: FileHandle, owner: int, start: int, end: int, mode: int
    ) -> LockRange | None:
        """A conflicting record lock of another owner, or None.

        Its pid is 0 if it belongs to another client.
        """
        _check(start, end, mode)
        request = meta_pb2.LocksRequest(
            inode=handle.inode, kind=RECORD, owner=owner, start=start, end=end, mode=mode
        )
        reply = await self._meta.ask(handle.inode, wire_pb2.META_LOCKS, request, meta_pb2.LocksReply)
        for lock in reply.locks:
            return LockRange(
                lock.start, lock.end, lock.mode, lock.pid if lock.session == request.session else 0
            )
        return None

    async def locks_on(self, inode: int) -> list[meta_pb2.HeldLock]:
        """The locks of all clients on the file, granted and waiting. At most the first thousand."""
        request = meta_pb2.LocksRequest(inode=inode)
        return list((await self._meta.ask(inode, wire_pb2.META_LOCKS, request, meta_pb2.LocksReply)).locks)

    async def setlk(
        self,
        handle: FileHandle,
        owner: int,
        start: int,
        end: int,
        mode: int,
        pid: int = 0,
        *,
        wait: bool = False,
    ) -> bool:
        """Lock or unlock the bytes `start` to `end`, both included, as fcntl(2).

        Returns whether other clients have changed the file since this client last looked: then the caller
        must drop all that it has cached of the file.

        WouldBlock      another owner's lock conflicts, and `wait` is not set
        WouldDeadlock   the holder of a conflicting lock waits for a lock of this owner
        TooManyLocks, BadHandle, LockLost
        Cancellation leaves the locks as they were; it may take a moment until other clients see that.
        """
        _check(start, end, mode)
        if (mode == SHARED and not handle.readable) or (mode == EXCLUSIVE and not handle.writable):
            raise BadHandle(
                "a shared lock wants a descriptor that may read, an exclusive one a descriptor that may write"
            )
        return await self._lock(handle, LockKey(handle.inode, RECORD, owner), start, end, mode, pid, wait)

    async def flock(
        self, handle: FileHandle, owner: int, mode: int, pid: int = 0, *, wait: bool = False
    ) -> bool:
        """Lock or unlock the whole file, as flock(2); else as `setlk`.

        If the lock cannot be converted to the other mode, the old lock is lost.
        """
        _check(0, LAST_BYTE, mode)
        return await self._lock(handle, LockKey(handle.inode, WHOLE, owner), 0, LAST_BYTE, mode, pid, wait)

    async def release_owner(self, handle: FileHandle, owner: int) -> None:
        """Release all record locks of the owner on the file, as close(2) does.

        This includes locks that were acquired through other descriptors.
        """
        key = LockKey(handle.inode, RECORD, owner)
        if key in self.owned:
            await self._release_all(handle.file, key)

    async def release_handle(self, handle: FileHandle) -> None:
        """Release the locks of an open file whose last descriptor was closed."""
        for key in [key for key, owned in self.owned.items() if handle in owned.handles]:
            await self._release_all(handle.file, key)

    # -- acquiring and releasing ---------------------------------------------------------------------------------------

    async def _lock(
        self, handle: FileHandle, key: LockKey, start: int, end: int, mode: int, pid: int, wait: bool
    ) -> bool:
        file = handle.file
        if file.lost:
            raise LockLost()
        if not mode and key not in self.owned:
            return False
        await self._unreported.publish(file)
        request = meta_pb2.LockRequest(
            inode=key.inode,
            kind=key.kind,
            owner=key.owner,
            start=start,
            end=end,
            mode=mode,
            pid=pid,
            wait=wait,
        )
        try:
            while True:
                reply = await self._ask_lock(handle, key, request)
                request.ticket = reply.ticket
                if reply.granted:
                    return bool(mode) and self._revalidate(file, reply.attr)
                if not wait:
                    raise WouldBlock()
                await self._turns.turn(key.inode, reply.ticket)
        finally:
            if request.ticket:
                self._turns.give_up(key.inode, request.ticket)

    async def _ask_lock(
        self, handle: FileHandle, key: LockKey, request: meta_pb2.LockRequest
    ) -> meta_pb2.LockReply:
        """Send the lock request and record its result."""
        owned = await self.claim(key)
        try:
            if request.mode:
                self._keep_owner(key, owned, handle)
            await self._correct_locks(key, owned)
            asking = asyncio.create_task(self._change_lock(key, request))
        except BaseException:
            self.unclaim(key, owned)
            raise
        try:
            reply, session = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._background.start(self._take_back(key, owned, request, asking))
            raise
        except NvpoolError as error:
            if error.may_be_applied:
                self._doubt(owned, request)
            self.unclaim(key, owned)
            raise
        try:
            if handle.file.lost or not self._meta.lives(session):
                if reply.granted:
                    owned.doubtful.append((request.start, request.end, UNLOCKED))
                raise LockLost()
            if reply.granted:
                laid(owned.spans, request.start, request.end, request.mode, request.pid).apply(owned.spans)
                owned.handles.add(handle)
            elif key.kind == WHOLE:
                owned.spans.clear()
        finally:
            self.unclaim(key, owned)
        return reply

    async def _change_lock(
        self, key: LockKey, request: meta_pb2.LockRequest
    ) -> tuple[meta_pb2.LockReply, int]:
        """The reply, and the session in which it was given."""
        reply = await self._meta.change(key.inode, wire_pb2.META_LOCK, request, meta_pb2.LockReply)
        return reply, request.change.session

    async def claim(self, key: LockKey) -> OwnedLocks:
        """The owner's locks, reserved for the caller until `unclaim`."""
        while True:
            owned = self.owned.get(key) or self.add_owner(key)
            await owned.asking.acquire()
            if self.owned.get(key) is owned:
                return owned
            owned.asking.release()

    def add_owner(self, key: LockKey) -> OwnedLocks:
        owned = self.owned[key] = OwnedLocks()
        self.owners[key.inode] += 1
        return owned

    def unclaim(self, key: LockKey, owned: OwnedLocks) -> None:
        if not owned.spans and not owned.doubtful:
            self._forget(key)
        owned.asking.release()

    def _keep_owner(self, key: LockKey, owned: OwnedLocks, handle: FileHandle) -> None:
        """Record the owner in the mount state before the request, for a successor process. TooManyOpen.

        The successor asks the service which locks this owner has.
        """
        if self._kept is not None and handle.number and handle not in owned.handles:
            index = self._kept.locks.take()
            self._kept.locks.put(index, key.inode, key.owner, handle.number, key.kind)
            owned.kept.append(index)

    def _forget(self, key: LockKey) -> None:
        for index in self.owned[key].kept:
            self._kept.locks.give_back(index)
        del self.owned[key]
        self.owners[key.inode] -= 1
        if not self.owners[key.inode]:
            del self.owners[key.inode]

    def _revalidate(self, file: OpenInode, attr) -> bool:
        self._cache.distrust()
        self._leases.forget(file.inode)
        self._cache.put_attr(attr)
        # The previous holder may have written and died: then the service knows no change, and no lease was
        # recalled.
        self._reader.forget_content(file.inode)
        file.fetching = None
        foreign, file.foreign = file.foreign, False
        if foreign:
            self._reader.changed(file)
            self._cache.notify_changed(file)
        return foreign

    # -- interrupted requests ------------------------------------------------------------------------------------------

    async def _take_back(
        self, key: LockKey, owned: OwnedLocks, request: meta_pb2.LockRequest, asking: asyncio.Task
    ) -> None:
        """Await a request whose caller was cancelled, and undo it."""
        try:
            reply, session = await asking
            if not self._meta.lives(session):
                return
            if reply.granted:
                self._doubt(owned, request)
            elif key.kind == WHOLE:
                owned.spans.clear()
            if reply.ticket:
                self._turns.give_up(key.inode, reply.ticket)
            await self._correct_locks(key, owned)
        except NvpoolError as error:
            if error.may_be_applied:
                self._doubt(owned, request)
        finally:
            self.unclaim(key, owned)

    @staticmethod
    def _doubt(owned: OwnedLocks, request: meta_pb2.LockRequest) -> None:
        """Keep the locks that the owner has in both outcomes of a doubtful request.

        The request may have been executed or not. All other locks are released.
        """
        after = list(owned.spans)
        laid(after, request.start, request.end, request.mode, request.pid).apply(after)
        for start, end, mode in weaker(owned.spans, after, request.start, request.end):
            owned.doubtful.append((start, end, mode))
            laid(owned.spans, start, end, mode, request.pid).apply(owned.spans)

    async def _correct_locks(self, key: LockKey, owned: OwnedLocks) -> None:
        """Correct the locks at the service to those recorded here.

        The new locks are never stronger than those the service may record, so no other owner can conflict.
        """
        while owned.doubtful:
            piece = start, end, mode = owned.doubtful[0]
            request = meta_pb2.LockRequest(
                inode=key.inode, kind=key.kind, owner=key.owner, start=start, end=end, mode=mode
            )
            session = self._meta.session_of(key.inode)
            try:
                _, its = await self._change_lock(key, request)
            except NotFound:
                its = session  # the file is gone, and so are its locks
            if owned.doubtful and owned.doubtful[0] is piece:
                del owned.doubtful[0]
            if mode and its != session and not self._meta.lives(session):
                # the request started a new session, in which nothing was locked before
                owned.doubtful.append((start, end, UNLOCKED))

    async def _release_all(self, file: OpenInode, key: LockKey) -> None:
        """Release all locks of the owner on the file. A release that fails now is retried later."""
        try:
            await self._unreported.publish(file)
        except NvpoolError as error:
            log.warning(
                "locks on inode %d are given back before what was written is known to all: %s",
                key.inode,
                error,
            )
        owned = await self.claim(key)
        try:
            owned.spans.clear()
            owned.handles.clear()
            owned.doubtful[:] = [(0, LAST_BYTE, UNLOCKED)]
            await self._correct_locks(key, owned)
        except NvpoolError as error:
            log.warning("locks on inode %d cannot be given back yet: %s", key.inode, error)
        finally:
            self.unclaim(key, owned)

    async def run_once(self) -> None:
        """Try again to correct doubtful locks at the service, in the background."""
        for key, owned in list(self.owned.items()):
            if owned.doubtful and not owned.asking.locked():
                await owned.asking.acquire()
                self._background.start(self._correct_locks_later(key, owned))

    async def _correct_locks_later(self, key: LockKey, owned: OwnedLocks) -> None:
        try:
            await self._correct_locks(key, owned)
        except NvpoolError:
            pass  # retried in half a second
        finally:
            self.unclaim(key, owned)

    # -- the end of a session ----------------------------------------------------------------------------------------------

    def session_lost(self, shard: int) -> None:
        """Mark all files with locks at this shard as lost: others may acquire the locks soon.

        Programs that relied on the locks must not continue. The quota reservations at the shard are lost too.
        """
        self._rooms.shard_restarted(shard)
        self._reader.forget_contents()
        for file in self._cache.open.values():
            file.fetching = None
        lost: set[int] = set()
        for key, owned in list(self.owned.items()):
            if self._meta.shard_of(key.inode) != shard:
                continue
            if owned.spans:
                lost.add(key.inode)
            owned.spans.clear()
            owned.handles.clear()
            owned.doubtful.clear()
            if not owned.asking.locked():
                self._forget(key)
        for inode in lost:
            file = self._cache.open.pop(inode, None)  # a later open gets a new object
            log.error(
                "the session has ended, and with it the locks on inode %d: %s",
                inode,
                "programs that have it open must open it again" if file is not None else "nobody has it open",
            )
            if file is not None:
                file.lost = True
                self._reader.changed(file)
                self._writer.lose(file)
                self._callbacks.on_lost(inode)

    def close(self) -> None:
        """Stop all waits for locks and all background work."""
        self._turns.close()
        self._background.cancel()


def _check(start: int, end: int, mode: int) -> None:
    if not 0 <= start <= end <= LAST_BYTE or not UNLOCKED <= mode <= EXCLUSIVE:
        raise InvalidRequest(f"there is no lock of mode {mode} on bytes {start} to {end}")
