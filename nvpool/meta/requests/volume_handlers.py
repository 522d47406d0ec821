"""Handlers of volume requests, and the background work on volumes.

An admin command states the desired state of a volume, so it needs no slot: if it is repeated, it finds that
state already there. A command is durable when it is answered. Made by `meta/server/service`; requests for the
trash are in `meta/requests/trash_handlers`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import ceil

from nvpool.core.errors import (
    AccessDenied,
    CorruptRecord,
    InUse,
    InvalidRequest,
    NotFound,
    NvpoolError,
    Unavailable,
)
from nvpool.core.ids import partition_of
from nvpool.core.names import check_holder
from nvpool.core.units import MIB, PARTITION_COUNT
from nvpool.meta.operations import trash, volume_requests
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.internal_changes import InternalChanges
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.state.record_locks import LockedRecord, when_free
from nvpool.meta.state.volume_access import check_action, right_of
from nvpool.meta.state.volume_records import (
    ATTACHMENTS_MAX,
    LISTED,
    REMOVING,
    SEALED,
    VOLUME,
    VolumeRecord,
    VolumeUse,
    decode_volume,
    encode_attached,
    encode_volume,
    range_of,
    volume_key,
    volume_of_key,
)
from nvpool.meta.volumes.removal import Removal, removed
from nvpool.meta.volumes.right_revocation import ALL, lost_rights
from nvpool.rpc.api import Call
from nvpool.rpc.peer_roles import Credentials
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

LIST_STEP = 128
"""Partitions or volumes that are scanned before other requests get their turn: a millisecond."""
UNLIMITED_S = 10.0
"""Seconds after which a writer checks again whether a volume without a quota has one now."""
READER_ATTACHMENTS_MAX = ATTACHMENTS_MAX // 4
"""Attachments that one client which may only read in the volume adds to it, so that others have room."""
AHEAD_BYTES, AHEAD_SHARE = 64 * MIB, 16
"""Quota reserved for a writer beyond its need: this many bytes, or this share of the free quota if less."""
CLOSES_S, CLOSES_LOOK_S = 1.0, 0.05
"""A client reports closes some tenths of a second late. A volume counts as in use only if files are still
open after CLOSES_S; they are checked every CLOSES_LOOK_S."""
_log = logging.getLogger(__name__)
_Request = pb.VolumeRequest


class VolumeHandlers:
    """Requests about volumes, and the removal of their contents."""

    def __init__(self, parts: ShardParts, replies: CallReplies, internal: InternalChanges) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._callers = parts.callers
        self._status = parts.status
        self._counters = parts.status.counters
        self._kv = parts.kv
        self._view = parts.view
        self._rooms = parts.rooms
        self._sessions = parts.sessions
        self._users = parts.users
        self._watches = parts.watches
        self._collector = parts.collector
        self._moment = parts.moment
        self._revocations = parts.revocations
        self._waits = parts.waits
        self._replies = replies
        self._internal = internal
        self.removals: dict[int, Removal] = {}
        self._attached_by: dict[int, dict[bytes, str]] = {}
        """By volume and holder: the member that has added the attachment; "" is a node."""

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {
            wire.META_VOLUMES: self._volumes,
            wire.META_VOLUME: self._volume,
            wire.META_VOLUME_ROOM: self._volume_room,
        }

    # -- memory --------------------------------------------------------------------------------------------------------

    def take_volumes(self, partitions: Iterable[int], promises_lost: bool) -> None:
        """Add partitions that belong to this shard from here on.

        `promises_lost`: sessions may hold quota reservations in them that are not known here.
        """
        found = set()
        for partition in partitions:
            for key, raw in self._kv.scan(*range_of(VOLUME, partition), 1000):
                found.add(partition)
                number = volume_of_key(key)
                if self._kv.scan(*trash.trash_range(number), 1):
                    self._view.trashes.add(number)
                try:
                    self._view.access.note(number, decode_volume(raw))
                except CorruptRecord as error:
                    _log.error("the record of a volume is left to fsck: %s", error)
        if promises_lost and found:
            self._rooms.begin_grace(frozenset(found))

    def forget_volumes(self, partitions: frozenset[int]) -> None:
        """Forget the volumes of partitions that belong to another shard from here on."""
        self._view.trashes -= {volume for volume in self._view.trashes if partition_of(volume) in partitions}
        self._rooms.forget(partitions)
        access = self._view.access
        for number in [
            number for number in {*access.restricted, *access.encrypted} if partition_of(number) in partitions
        ]:
            access.note(number, None)
            self.removals.pop(number, None)
        for number in [number for number in self._attached_by if partition_of(number) in partitions]:
            del self._attached_by[number]

    # -- queries ---------------------------------------------------------------------------------------------

    def _volumes(self, call: Call) -> None:
        self._sessions.of(
            pb.VolumesRequest.FromString(bytes(call.message)).session, self._callers.owner_of(call)
        )
        self._replies.reply_in_steps(call, self._listed_volumes(self._callers.owner_of(call)))

    def _listed_volumes(self, caller: str) -> Iterator[pb.VolumesReply | None]:
        """All volumes for a node (""); for a client those to which it has a right."""
        reply, view, steps = pb.VolumesReply(), self._view, 0
        for partition in range(PARTITION_COUNT):
            if view.is_elsewhere(partition):
                continue
            first, end = range_of(VOLUME, partition)
            for key, raw in view.scan(first, end, 1000):
                steps += 8
                number = volume_of_key(key)
                try:
                    record = decode_volume(raw)
                    if right_of(caller, record) is not None:
                        use = volume_requests.use_of(view, number)
                        reply.volumes.append(volume_requests.state_of(view, number, record, use, caller))
                except CorruptRecord:
                    continue  # left to fsck
            steps += 1
            if steps >= LIST_STEP:
                steps = 0
                yield None
        yield reply

    def _volume(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = _Request.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        if (user := self._callers.user_of(call)) is not None:
            self._users.check_volume(self._view, user, request)
        self._internal.check_here(request.inode)
        record, use = volume_requests.read_volume(self._view, request.inode)
        check_action(self._callers.owner_of(call), record, request)
        if request.action == _Request.SHOW:
            self._reply_volume(call, request.inode)
            return
        if request.action == _Request.KEY:
            self._reply_key(call, record)
            return
        if self._kv.full:
            self._replies.retry(call, self._kv.room)
            return
        if self._moment.changes_wait:
            self._replies.retry(call, self._moment.over)
            return
        if (
            request.action in (_Request.SEAL, _Request.REMOVE)
            and self._clock.boottime_s() < call.since_s + CLOSES_S
            and (
                self._opened_in(request.inode, record)
                or (request.action == _Request.SEAL and self._rooms.promised(request.inode))
            )
        ):
            self._replies.retry(call, lambda: asyncio.sleep(CLOSES_LOOK_S))
            return
        if request.action == _Request.REMOVE:
            self._waits.add(
                call, lambda: self._remove_volume(request), lambda: self._reply_removed(call, request.inode)
            )
            return
        if record.flags & REMOVING:
            raise NotFound(f"volume {record.name} is being removed")
        self._carry_out(request, record, use, self._callers.owner_of(call))
        reply = pb.VolumeReply()
        self._waits.add(
            call,
            partial(self._settle, request.inode, self._kv.sequence, reply),
            lambda: self._reply_volume(call, request.inode, reply),
            may_be_applied=True,
        )

    def _reply_key(self, call: Call, record: VolumeRecord) -> None:
        """Reply with the volume's key, after the check that the caller may read in the volume. KeyMissing."""
        reply = pb.VolumeReply()
        if record.wrapped_key:
            reply.key, reply.wrapped_key = self._view.pool_keys.unwrap(record.wrapped_key), record.wrapped_key
        call.reply(reply.SerializeToString())

    async def _settle(self, number: int, sequence: int, reply: pb.VolumeReply) -> None:
        """Wait until the change is durable and the stores refuse revoked rights."""
        await self._kv.sync(sequence)
        if self._revocations.owes(number):
            reply.revoked_in_s = ceil(await self._revocations.settle(number))

    def _reply_volume(self, call: Call, number: int, reply: pb.VolumeReply | None = None) -> None:
        reply = reply or pb.VolumeReply()
        record, use = volume_requests.read_volume(self._view, number)
        reply.volume.CopyFrom(
            volume_requests.state_of(self._view, number, record, use, self._callers.owner_of(call))
        )
        call.reply(reply.SerializeToString())

    def _carry_out(self, request: _Request, record: VolumeRecord, use: VolumeUse, caller: str) -> None:
        """Apply the command of the caller. Nothing waits in here."""
        number, action, access = request.inode, request.action, self._view.access
        if action in (_Request.ATTACH, _Request.DETACH):
            self._attach(request, record, caller)
            return
        if action == _Request.SET:
            new = volume_requests.limited(record, use, self._rooms.promised(number), request)
        elif action == _Request.SEAL:
            self._check_no_writers(record, number)
            new = record._replace(flags=record.flags | SEALED)
        elif action == _Request.REWRAP:
            new = (
                record._replace(wrapped_key=self._view.pool_keys.rewrap(record.wrapped_key))
                if record.wrapped_key
                else record
            )
        elif action == _Request.GRANT:
            new = volume_requests.granted(record, request.grant)
        elif action == _Request.REVOKE:
            new = volume_requests.revoked(record, request.grant.client)
            if record.flags & LISTED:
                # again, in case a process died before finishing it
                self._revocations.owe(number, {request.grant.client: ALL})
        else:
            raise InvalidRequest(
                f"nothing is known that could be done with a volume under the number {action}"
            )
        if new == record:
            return
        self._kv.apply([(volume_key(VOLUME, number), encode_volume(new))], reclaims=True)
        access.note(number, new)
        self._revocations.owe(number, lost_rights(record, new))
        if (new.flags, new.grants) != (record.flags, record.grants):
            self._watches.end_all()  # a client that lost its right must not rely on cached state

    def _attach(self, request: _Request, record: VolumeRecord, caller: str) -> None:
        """Add or remove an attachment.

        A client that may only read in the volume removes no attachment that another member is known to have
        added, and adds a share of all. The records do not name the member, so only this process knows it:
        after a restart each client that may read removes the older attachments. AccessDenied, InUse.
        """
        holder = check_holder(request.holder)
        key = volume_requests.attached_key(request.inode, holder)
        there = self._view.get(key) is not None
        added = self._attached_by.get(request.inode, {})
        only_reads = right_of(caller, record) is False
        if request.action == _Request.DETACH:
            if not there:
                return
            owner = added.get(holder, caller)
            if only_reads and owner != caller and not self._has_left(owner):
                raise AccessDenied(
                    f"{caller} may only read in volume {record.name}, and {owner or 'a node of the pool'} has "
                    f"attached it to {request.holder}; detach it from there, or from a node of the pool"
                )
            self._kv.apply([(key, None)], reclaims=True)
            added.pop(holder, None)
        elif not there:
            if only_reads and sum(owner == caller for owner in added.values()) >= READER_ATTACHMENTS_MAX:
                raise InUse(
                    f"{caller}, which may only read in volume {record.name}, has attached it "
                    f"{READER_ATTACHMENTS_MAX} times already, which is the most; detach it where it is not used"
                )
            if len(volume_requests.attachments(self._view, request.inode)) >= ATTACHMENTS_MAX:
                raise InUse(
                    f"volume {record.name} is attached {ATTACHMENTS_MAX} times already, which is the most"
                )
            self._kv.apply([(key, encode_attached(self._clock.wall_ns()))])
            self._attached_by.setdefault(request.inode, {})[holder] = caller

    def _has_left(self, member: str) -> bool:
        """Whether the member was removed from the pool, as far as the pool map says."""
        pool_map = self._status.pool_map
        return bool(member and pool_map is not None and pool_map.members and member not in pool_map.members)

    def _opened_in(self, number: int, record: VolumeRecord) -> dict[str, int]:
        """Number of open inodes of the volume per client and owner of its session.

        Those of a client without a right to the volume do not count: the stores refuse it anyway.
        """
        found: dict[str, int] = {}
        partition, view = partition_of(number), self._view
        granted = dict(record.grants) if record.flags & LISTED else None
        for session in self._sessions.by_number.values():
            if granted is not None and session.owner and session.owner not in granted:
                continue
            count = 0
            for inode in session.opens:
                if partition_of(inode) == partition:
                    try:
                        count += view.inode(inode).volume == number
                    except NvpoolError:
                        continue
            if count:
                who = f"{session.client} of {session.owner}" if session.owner else session.client
                found[who] = found.get(who, 0) + count
        return found

    def _check_no_writers(self, record: VolumeRecord, number: int) -> None:
        """InUse: files of the volume are open and may be written; a seal is final."""
        opened = self._opened_in(number, record)
        promised = self._rooms.promised(number)
        if opened or promised:
            who = ", ".join(f"{client} ({count})" for client, count in sorted(opened.items())[:5])
            raise InUse(
                f"volume {record.name} is not sealed while files of it are open: {who or 'a writer is not done'}"
            )

    # -- quota reservations ----------------------------------------------------------------------------------

    def _volume_room(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.VolumeRoomRequest.FromString(bytes(call.message))
        session = self._sessions.of(request.session, self._callers.owner_of(call)).number
        if (user := self._callers.user_of(call)) is not None:
            self._users.check_volume(self._view, user, request)
        number, rooms = request.inode, self._rooms
        record, use = volume_requests.read_volume(self._view, number)
        self._view.access.check_change(number)
        reply = pb.VolumeRoomReply(life_ms=int(UNLIMITED_S * 1000))
        if not record.bytes_max:
            rooms.promise(number, session, 0)
            reply.unlimited = True
            call.reply(reply.SerializeToString())
            return
        reply.bytes_max = record.bytes_max
        before = rooms.of(number, session)
        others = rooms.promised(number) - before
        free = max(0, record.bytes_max - use.bytes - others)
        if user is not None and not self._may_reserve(user, session, number):
            free = 0  # it keeps what it has
        if request.again and rooms.grace_left_s(number):
            # the previous process or shard has reserved it, so it fits into the quota; a user is not believed
            reply.bytes = request.bytes if user is None else min(request.bytes, free)
        elif request.bytes <= before:
            reply.bytes = request.bytes
        elif (grace_s := rooms.grace_left_s(number)) > 0:
            self._replies.retry(call, lambda: asyncio.sleep(grace_s))
            return
        else:
            ahead = min(AHEAD_BYTES, max(0, free - request.needed) // AHEAD_SHARE)
            reply.bytes = max(before, min(request.bytes, request.needed + ahead, free))
        rooms.promise(number, session, reply.bytes)
        call.reply(reply.SerializeToString())

    def _may_reserve(self, user: Credentials, session: int, volume: int) -> bool:
        """Whether a user's session may reserve quota of the volume: it must be able to write there.

        A session from before a restart of the shard has one lease time to say what it has open.
        """
        return (
            session in self._sessions.restored and self._clock.boottime_s() < self._collector.grace_until_s
        ) or self._users.may_write_in(self._view, user, session, volume)

    # -- removal -------------------------------------------------------------------------------------------------------

    async def _remove_volume(self, request: _Request) -> None:
        """Remove the volume's name, durably; its contents are removed in the background.

        InUse: the volume is attached or has open files; the error names the holders.
        """
        number = request.inode

        def check(record: VolumeRecord) -> None:
            holders = volume_requests.attachments(self._view, number)
            if holders and not request.force:
                raise InUse(
                    f"volume {record.name} is attached: {', '.join(holders[:5])}"
                    f"{' and others' if len(holders) > 5 else ''}"
                )
            if opened := self._opened_in(number, record):
                who = ", ".join(f"{client} ({count})" for client, count in sorted(opened.items())[:5])
                raise InUse(f"files of volume {record.name} are open: {who}")

        await self._internal.carry_out(partial(removed, number=number, check=check), request.session)
        try:
            record, _ = await when_free(lambda: volume_requests.read_volume(self._view, number))
            self._view.access.note(number, record)
            self._watches.end_all()  # all leases on the contents of the volume
        except NotFound:
            self._view.access.note(number, None)
        self._rooms.by_volume.pop(number, None)
        self._attached_by.pop(number, None)
        self._collector.add(number)
        await self._kv.sync()
        self._revocations.owe(number, {"": ALL})
        try:
            await self._revocations.settle(number)
        except Unavailable as error:
            _log.warning("volume %d is removed: %s", number, error)

    def _reply_removed(self, call: Call, number: int) -> None:
        try:
            self._reply_volume(call, number)
        except NotFound:
            call.reply(pb.VolumeReply().SerializeToString())

    async def remove_more(self) -> int:
        """Remove some contents of volumes that are being removed; return how many inodes.

        Takes steps of a few ms.
        """
        gone = 0
        for number, record in list(self._view.access.restricted.items()):
            if not record.flags & REMOVING:
                continue
            removal = self.removals.get(number)
            if removal is None:
                removal = self.removals[number] = Removal(
                    self._kv, self._view, self._collector, self._clock, number
                )
            try:
                until_s = self._clock.boottime_s() + self._options.tick_s / 4
                while (
                    not removal.done
                    and self._clock.boottime_s() < until_s
                    and await self._internal.may_change(number, 0, removal.next)
                ):
                    gone += removal.step()
                    await asyncio.sleep(0)
            except LockedRecord:
                continue  # tried again at the next round
            except NvpoolError as error:
                _log.warning("volume %s cannot be removed further yet: %s", record.name, error)
                self.removals.pop(number, None)
                continue
            if removal.done:
                self.removals.pop(number, None)
                self._view.access.note(number, None)
        return gone
