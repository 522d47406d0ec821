"""Handlers of trash requests, and the removal of expired entries. Made by `meta/server/service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nvpool.core.errors import NotFound, NvpoolError
from nvpool.core.ids import partition_of
from nvpool.meta.operations import trash, volume_requests
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.internal_changes import InternalChanges
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.meta.state.transaction import Draft, View
from nvpool.meta.state.volume_access import check_trash
from nvpool.meta.state.volume_records import decode_trashed
from nvpool.meta.volumes.removal import STEP
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

TRASH_LISTED, TRASH_LOOKED_AT, PURGED_PER_REQUEST = 500, 1000, 10_000
_log = logging.getLogger(__name__)


class TrashHandlers:
    """Trashes of the volumes of a shard."""

    def __init__(self, parts: ShardParts, replies: CallReplies, internal: InternalChanges) -> None:
        self._counters = parts.status.counters
        self._clock = parts.clock
        self._callers = parts.callers
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._collector = parts.collector
        self._waits = parts.waits
        self._replies = replies
        self._internal = internal
        self._purged_up_to: dict[int, int] = {}

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {wire.META_TRASH: self._trash}

    def _trash(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.TrashRequest.FromString(bytes(call.message))
        session = self._sessions.of(request.session, self._callers.owner_of(call)).number
        number = request.inode
        self._internal.check_here(number)
        record, _ = volume_requests.read_volume(self._view, number)
        caller = self._callers.owner_of(call)
        check_trash(caller, record, request.action != pb.TrashRequest.LIST)
        if request.action == pb.TrashRequest.LIST:
            call.reply(trash.listed(self._view, request, TRASH_LISTED).SerializeToString())
        elif request.action == pb.TrashRequest.RESTORE:
            self._waits.add(call, lambda: self.restore(request, session, caller), lambda: call.reply(b""))
        else:
            reply = pb.TrashReply()
            self._waits.add(
                call,
                lambda: self._purge_on_request(request, session, reply, caller),
                lambda: call.reply(reply.SerializeToString()),
            )

    async def restore(self, request: pb.TrashRequest, session: int, caller: str) -> None:
        """Restore an entry, durably, if the caller still has the right to change the trash."""

        def decide(view: View, now_ns: int) -> Draft:
            _check_trash_still(view, request.inode, caller)
            return trash.restored(view, request, now_ns)

        await self._internal.carry_out(decide, session)
        await self._kv.sync()

    async def _purge_on_request(
        self, request: pb.TrashRequest, session: int, reply: pb.TrashReply, caller: str
    ) -> None:
        """Purge one entry, or some of all entries; `next` in the reply says that there are more."""
        while True:
            try:
                await self._purge_asked(request, session, reply, caller)
                break
            except LockedRecord as held:
                await held.wait()
        await self._kv.sync()

    async def _purge_asked(
        self, request: pb.TrashRequest, session: int, reply: pb.TrashReply, caller: str
    ) -> None:
        self._internal.check_here(request.inode)
        if request.entry:
            if self._view.get(trash.trash_key(request.inode, request.entry)) is None:
                raise NotFound(f"inode {request.entry} is not in the trash of the volume")
            reply.purged = await self._purge(request.inode, [request.entry], session, caller)
        else:
            while reply.purged < PURGED_PER_REQUEST:
                pairs = self._view.scan(*trash.trash_range(request.inode), STEP)
                if not pairs:
                    break
                reply.purged += await self._purge(
                    request.inode, [trash.inode_of_trash_key(key) for key, _ in pairs], session, caller
                )
            else:
                reply.next = 1

    async def _purge(self, volume: int, inodes: list[int], session: int, caller: str | None = None) -> int:
        """Remove these inodes from the trash after a recall of all leases on them. Return the count.

        `caller`: client whose right is checked after the recall; None: the shard itself. AccessDenied,
        ReadOnly: it has lost the right, or the volume was sealed. Held, WrongShard, Unavailable: this shard
        cannot purge them now.
        """
        if not await self._internal.may_change(volume, session, lambda: inodes):
            self._internal.check_here(volume)
        if caller is not None:
            _check_trash_still(self._view, volume, caller)
        draft = trash.purged(self._view, volume, inodes, self._clock.wall_ns())
        effects = draft.finish()
        if effects:
            self._kv.apply(effects, reclaims=True)
        for orphan in draft.orphans:
            self._collector.add(orphan)
        return len(draft.orphans)

    async def purge_more(self) -> int:
        """Remove expired entries from the trashes, some entries of each volume at a time.

        Return how many inodes.
        """
        gone, now_ns = 0, self._clock.wall_ns()
        for volume in list(self._view.trashes):
            if not self._view.serves(partition_of(volume)):
                continue
            after = self._purged_up_to.get(volume, 0)
            pairs = self._kv.scan(*trash.trash_range(volume, after), TRASH_LOOKED_AT)
            if not pairs and not after:
                self._view.trashes.discard(volume)
            if len(pairs) < TRASH_LOOKED_AT:
                self._purged_up_to.pop(volume, None)
            else:
                self._purged_up_to[volume] = trash.inode_of_trash_key(pairs[-1][0])
            try:
                over = [
                    trash.inode_of_trash_key(key)
                    for key, raw in pairs
                    if decode_trashed(raw).expires_ns <= now_ns
                ]
                for at in range(0, len(over), STEP):
                    gone += await self._purge(volume, over[at : at + STEP], 0)
                    await asyncio.sleep(0)
            except LockedRecord:
                continue  # tried again at the next round
            except NvpoolError as error:
                _log.warning("the trash of volume %d is left as it is: %s", volume, error)
        return gone


def _check_trash_still(view: View, volume: int, caller: str) -> None:
    """As `check_trash`, for a change that has waited since the caller's right was checked."""
    check_trash(caller, volume_requests.read_volume(view, volume)[0], True)
