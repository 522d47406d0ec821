"""Failover of shards: primary leases, and promotion of a standby when a primary is lost.

The primary of a shard with standbys sends a heartbeat (META_ALIVE) to the leader every half second. The primary lease
counts from the sending there and from the arrival here: so the lease has ended at the primary before it ends
here. If a primary has been silent for a whole lease, or its process on this node has ended, a standby that is
up replaces it, if there is one.

Primaries also ask the leader to mark a standby as up or not (META_STANDBY), to give partitions to another
shard (META_MOVED), and to have grants of a volume refused (META_TAKE_RIGHT). poolmap/shards/members,
poolmap/shards/partition_moves and poolmap/grant_revocation decide the changes. Used by node/supervisor.

A standby is asked for its records before it is promoted, and is demoted if it has lost them. An empty member
never becomes primary: a shard rather waits than serves without changes that were acknowledged.

No primary lease is granted for longer than the leadership lease is certainly valid (`CoordinatorLease.left_s`). So
when another node leads, all earlier primary leases have ended and need not be waited for again. A new leader that has seen
the former leader for a whole lease gives primaries only the time to send a heartbeat, and gives none to those
on the former leader's node, which is probably dead as a whole. A new leader that has not seen it (its
coordinator was just opened) waits for a whole lease.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.errors import InvalidRequest, NvpoolError, StaleEpoch, StaleTerm
from nvpool.core.units import PARTITION_COUNT
from nvpool.meta.service_auth import AuthorityCheck
from nvpool.node.coordination.leadership import Leadership
from nvpool.poolmap import grant_revocation
from nvpool.poolmap.model import PoolMap, Shard, encode_map
from nvpool.poolmap.shards import members as member_changes
from nvpool.poolmap.shards import partition_moves
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.rpc.v1.moving_pb2 import MovedReply, MovedRequest

LEASE_S = 2.5
LOOK_S = 0.1
HEARD_S = 1.5
"""Time for a primary to find the new leader: three heartbeats."""

log = logging.getLogger(__name__)

Change = Callable[[Callable[[PoolMap], PoolMap]], Awaitable[PoolMap]]
HasRecords = Callable[[Shard, int], Awaitable[bool | None]]


class _Lost(NamedTuple):
    """A primary that must be replaced."""

    shard: Shard
    ended: bool
    heard: tuple[int, float]
    """Term and time of its last heartbeat when this was decided."""


class ShardFailover:
    def __init__(
        self,
        pool_map: Callable[[], PoolMap],
        change: Change,
        clock: Clock,
        secret: Callable[[], bytes],
        leads: Callable[[], Leadership | None],
        lease_s: float = LEASE_S,
        *,
        change_anywhere: Change | None = None,
        has_records: HasRecords | None = None,
        unaware: Callable[[int], Collection[int]] = lambda epoch: (),
    ) -> None:
        """Create the failover task of one node.

        `change(decide)` replaces the newest map by the result of `decide` and returns the new map. `secret`
        returns the pool's grant key; it is called at the first message. `leads` returns this node's
        leadership, or None when another node's supervisor receives the heartbeats; then nothing is decided
        here except for ended processes of this node (`change_anywhere`). `has_records(shard, member)` asks a
        standby before its promotion whether it still has its records; None: it does not answer, or its drive
        is missing. Without that function every standby that is up counts as having them. `unaware(epoch)`:
        targets that serve and do not know the map of that epoch yet.
        """
        self._newest = pool_map
        self.change = change
        self._clock = clock
        self._secret = secret
        self._checking: AuthorityCheck | None = None
        self._leads = leads
        self.change_anywhere = change_anywhere or change
        self._has_records = has_records
        self._lease_s = lease_s
        self._unaware = unaware
        self._leadership: Leadership | None = None
        self._replacing: dict[int, tuple[int, int]] = {}
        """Shard -> term in which its primary is being replaced, and epoch of that map."""
        self._heard: dict[int, tuple[int, float]] = {}  # shard -> term and time of the last heartbeat
        self._ended: dict[int, int] = {}  # shard -> term in which the primary's process has ended
        self._said: dict[int, int] = {}  # shard -> term in which no standby answered, as logged
        self._woken = asyncio.Event()

    METHODS = frozenset((wire.META_ALIVE, wire.META_STANDBY, wire.META_MOVED, wire.META_TAKE_RIGHT))

    def _check(self, authority: bytes) -> None:
        if self._checking is None:
            self._checking = AuthorityCheck(self._clock, self._secret())
        self._checking(authority)

    async def answer(self, method: int, message: bytes) -> bytes:
        """Return the encoded response to one of METHODS.

        StaleGrant, StaleTerm, StaleMember, InvalidRequest; DecodeError: the message is malformed.
        """
        if method == wire.META_ALIVE:
            alive = pb.ShardAliveRequest.FromString(message)
            self._check(alive.authority)
            return (await self._alive(alive)).SerializeToString()
        if method == wire.META_MOVED:
            moved = MovedRequest.FromString(message)
            self._check(moved.authority)
            return (await self._moved(moved)).SerializeToString()
        if method == wire.META_TAKE_RIGHT:
            taken = pb.TakeRightRequest.FromString(message)
            self._check(taken.authority)
            return (await self._take_right(taken)).SerializeToString()
        request = pb.StandbyRequest.FromString(message)
        self._check(request.authority)

        def decide(pool_map: PoolMap) -> PoolMap:
            if request.up:
                return member_changes.standby_up(
                    pool_map, request.shard, request.member, request.term, request.epoch
                )
            return member_changes.standby_out(pool_map, request.shard, request.member, request.term)

        new = await self.change(decide)
        log.info(
            "standby %d of shard %d is %s",
            request.member,
            request.shard,
            "up" if request.up else "not up any more",
        )
        return pb.StandbyReply(map=encode_map(new)).SerializeToString()

    async def _take_right(self, request: pb.TakeRightRequest) -> pb.TakeRightReply:
        """Make stores refuse grants issued before now.

        Without `rights` only report stores that do not know it yet.
        """
        if not request.rights:
            return pb.TakeRightReply(unaware=self._unaware(request.known))
        new = await self.change(
            lambda newest: grant_revocation.taken(
                newest,
                request.volume,
                request.member,
                request.rights,
                self._clock.wall_ns() // 1_000_000,
                request.life_ms,
            )
        )
        return pb.TakeRightReply(map=encode_map(new), unaware=self._unaware(new.epoch))

    async def _moved(self, request: MovedRequest) -> MovedReply:
        """Give the partitions to another shard as planned. The returned map shows the result."""
        if len(request.partitions) % 2:
            raise InvalidRequest("partitions are 2 bytes each")
        partitions = struct.unpack(f"<{len(request.partitions) // 2}H", request.partitions)
        if any(partition >= PARTITION_COUNT for partition in partitions):
            raise InvalidRequest("there is no such partition")
        try:
            new = await self.change(
                lambda newest: partition_moves.moved(
                    newest, request.source, request.term, request.destination, partitions, request.map_epoch
                )
            )
        except StaleEpoch as error:
            log.info("%d partitions are not moved: %s", len(partitions), error)
            new = self._newest()
        return MovedReply(map=encode_map(new))

    async def _alive(self, request: pb.ShardAliveRequest) -> pb.ShardAliveReply:
        pool_map = self._newest()
        shard = member_changes.shard_of(pool_map, request.shard)
        if request.term == 0 and request.member == shard.member:
            heirs, lost = await self._look_at_standbys(shard)
            pool_map = await self.change(
                lambda newest: member_changes.primary_began(
                    newest, request.shard, request.member, heirs, lost, request.whole_term
                )
            )
            silent = (
                member_changes.up_standbys(shard)
                - member_changes.up_standbys(pool_map.shard_by_id[request.shard])
                - heirs
                - lost
            )
            shard = pool_map.shard_by_id[request.shard]
            if silent and shard.member == request.member:
                log.warning(
                    "member %d of shard %d was started again, has every acknowledged change, and goes on without "
                    "standby %s, which does not answer",
                    shard.member,
                    shard.id,
                    ", ".join(map(str, sorted(silent))),
                )
            self._heard[shard.id] = shard.term, self._clock.boottime_s()
            log.info("member %d of shard %d is its primary in term %d", shard.member, shard.id, shard.term)
        elif request.term:
            member_changes.check_term(shard, request.term)
        if request.term and request.member != shard.member:
            raise StaleTerm(
                f"member {shard.member} is the primary of shard {shard.id} in term {shard.term}, not member "
                f"{request.member} in term {request.term}"
            )
        leadership, withheld = self._leads(), self._is_withheld(shard)
        if request.term and not withheld:
            self._heard[shard.id] = shard.term, self._clock.boottime_s()
            self._ended.pop(shard.id, None)
        lease_s = 0.0 if withheld or leadership is None else min(self._lease_s, leadership.left_s())
        reply = pb.ShardAliveReply(
            lease_ms=int(lease_s * 1000),
            map=encode_map(pool_map) if pool_map.epoch > request.map_epoch else b"",
        )
        if request.member == shard.member:
            reply.term = shard.term
        return reply

    def _is_withheld(self, shard: Shard) -> bool:
        """Whether another member is replacing the primary now, or perhaps has: until that is known it gets no
        lease."""
        term, epoch = self._replacing.get(shard.id, (0, 0))
        if term == shard.term and self._newest().epoch < epoch:
            return True
        self._replacing.pop(shard.id, None)
        return False

    def member_ended(self, shard: int, member: int) -> None:
        """Report the end of a member's process: a primary serves again only after it has asked the leader."""
        known = self._newest().shard_by_id.get(shard)
        if known is not None and known.member == member:
            self._ended[shard] = known.term
            self._woken.set()

    async def run(self) -> None:
        """Monitor the primaries until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            try:
                await self.run_once()
            except NvpoolError as error:
                log.warning("no primary could be named: %s", error)

    def _begin(self, leadership: Leadership, now_s: float) -> None:
        """Start a new leadership: no primary has sent a heartbeat in it."""
        self._heard.clear()
        for shard in self._newest().shards:
            waits_s = self._lease_s
            if leadership.bounded:
                waits_s = 0.0 if shard.node == leadership.gone else HEARD_S
            self._heard[shard.id] = shard.term, now_s - self._lease_s + waits_s

    async def run_once(self) -> None:
        """Promote a standby of each shard whose primary is lost."""
        now_s = self._clock.boottime_s()
        leadership = self._leads()
        if leadership is None:
            self._heard.clear()
        elif leadership is not self._leadership:
            self._begin(leadership, now_s)
        self._leadership = leadership
        lost = []
        for shard in self._newest().shards:
            if not shard.standbys:
                continue
            ended = self._ended.get(shard.id) == shard.term
            heard = self._heard.get(shard.id, (0, 0.0))
            if not ended:
                if leadership is None:
                    continue
                if heard[0] != shard.term:
                    # A new primary: it has a whole lease to report.
                    self._heard[shard.id] = heard = shard.term, now_s
                if now_s - heard[1] <= self._lease_s:
                    continue
            if member_changes.up_standbys(shard):
                lost.append(_Lost(shard, ended, heard))
        found = await asyncio.gather(*(self._look_at_standbys(one.shard) for one in lost))
        for one, (heirs, without) in zip(lost, found, strict=True):
            if heirs or without:
                await self._replace(one, leadership, heirs, without)
            elif self._said.get(one.shard.id) != one.shard.term:
                self._said[one.shard.id] = one.shard.term
                log.warning(
                    "shard %d has no primary: its standbys that have everything do not answer", one.shard.id
                )

    async def _look_at_standbys(self, shard: Shard) -> tuple[frozenset[int], frozenset[int]]:
        """Ask the standbys that are up: those that have their records, and those that have lost them."""
        up = member_changes.up_standbys(shard)
        if self._has_records is None or not up:
            return up, frozenset()
        answers = dict(
            zip(up, await asyncio.gather(*(self._has_records(shard, member) for member in up)), strict=True)
        )
        return (
            frozenset(member for member, has in answers.items() if has),
            frozenset(member for member, has in answers.items() if has is False),
        )

    async def _replace(
        self, lost: _Lost, leadership: Leadership | None, heirs: frozenset[int], without: frozenset[int]
    ) -> None:
        """Promote one of the heirs; demote standbys without records."""
        shard = lost.shard

        def decide(newest: PoolMap) -> PoolMap:
            known = newest.shard_by_id.get(shard.id)
            if known is None or known.term != shard.term:
                raise StaleTerm("another has been named, or the shard has left the pool")
            still = (
                self._ended.get(shard.id) == shard.term
                if lost.ended
                else self._heard.get(shard.id) == lost.heard
            )
            if not still:
                raise StaleTerm("the primary was heard while its standbys were asked")
            new = member_changes.records_lost(newest, shard.id, without)
            new = member_changes.primary_lost(new, shard.id, heirs) or new
            if new is not newest:
                self._replacing[shard.id] = shard.term, newest.epoch + 1
            return new

        try:
            new = await (self.change_anywhere if leadership is None else self.change)(decide)
        except StaleTerm:
            if lost.ended and self._newest().shard_by_id.get(shard.id, shard).term != shard.term:
                self._ended.pop(shard.id, None)
            return
        after = new.shard_by_id[shard.id]
        if without:
            log.error(
                "standby %s of shard %d has lost its records", ", ".join(map(str, sorted(without))), shard.id
            )
        if after.term == shard.term:
            return
        self._heard[shard.id] = after.term, self._clock.boottime_s()
        log.warning(
            "the primary of shard %d, member %d, %s; member %d follows it in term %d",
            shard.id,
            shard.member,
            "has ended" if lost.ended else "was silent for its whole lease",
            after.member,
            after.term,
        )
