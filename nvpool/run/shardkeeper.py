"""Who is the primary of each shard: the leases of primaries, and the changes of the map when one is lost.

A primary of a shard with standbys says every half second that it lives (META_ALIVE), to who leads the pool. Its lease counts
from the sending, here it is counted from the arrival: so it has ended there before it has here. One that has been silent for a
whole lease, or whose process on this node has ended, is followed by a standby that is up, where there is one. Primaries ask
here that a standby be up, or be not (META_STANDBY), and that partitions be another shard's (META_MOVED). What changes is
decided by logic/shards and logic/moves. Used by run/supervisor.

No lease is given for longer than the leader's own lease at the coordinator lives for certain (`Lease.left_s`). So when another
one leads, all that was given before has ended, and nothing has to be waited for once more: who has seen the former leader for a
whole lease gives primaries only the time to be heard, and those on the former leader's node, which is likely to be gone as a
whole, none. Who has not (a coordinator that was just opened) waits for a whole lease.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable

from nvpool.base.clock import Clock
from nvpool.base.errors import InvalidRequest, NvpoolError, StaleEpoch, StaleTerm
from nvpool.base.units import PARTITION_COUNT
from nvpool.logic import moves, shards
from nvpool.logic.poolmap import PoolMap, Shard, encode_map
from nvpool.meta.service_right import AuthorityCheck
from nvpool.run.leading import Reign
from nvpool.wire.v1 import meta_pb2 as pb
from nvpool.wire.v1 import wire_pb2 as wire
from nvpool.wire.v1.moving_pb2 import MovedReply, MovedRequest

LEASE_S = 2.5
LOOK_S = 0.1
HEARD_S = 1.5
"""For a primary to find out who leads now: three signs of life."""

log = logging.getLogger(__name__)

Change = Callable[[Callable[[PoolMap], PoolMap]], Awaitable[PoolMap]]


class ShardKeeper:
    def __init__(self, pool_map: Callable[[], PoolMap], change: Change, clock: Clock,
                 secret: Callable[[], bytes], leads: Callable[[], Reign | None], lease_s: float = LEASE_S, *,
                 change_anywhere: Change | None = None) -> None:
        """`change(decide)` replaces the map by what `decide` makes of the newest, and returns the new one; `secret` is the
        pool's key of grants, asked for with the first message. `leads`: our reign, where primaries tell us that they live, and
        not another node's supervisor; nothing is decided else, but for the processes of this node that have ended
        (`change_anywhere`)."""
        self._newest = pool_map
        self._change = change
        self._clock = clock
        self._secret = secret
        self._checking: AuthorityCheck | None = None
        self._leads = leads
        self._change_anywhere = change_anywhere or change
        self._lease_s = lease_s
        self._reign: Reign | None = None
        self._replacing: dict[int, tuple[int, int]] = {}
        """Shard -> term in which its primary is being replaced, and the epoch of the map that would say so."""
        self._heard: dict[int, tuple[int, float]] = {}  # shard -> term, when
        self._ended: dict[int, int] = {}  # shard -> term in which the primary's process has ended
        self._woken = asyncio.Event()

    METHODS = frozenset((wire.META_ALIVE, wire.META_STANDBY, wire.META_MOVED))

    def _check(self, authority: bytes) -> None:
        if self._checking is None:
            self._checking = AuthorityCheck(self._clock, self._secret())
        self._checking(authority)

    async def answer(self, method: int, message: bytes) -> bytes:
        """The encoded answer to one of METHODS. StaleGrant, StaleTerm, StaleMember, InvalidRequest; DecodeError."""
        if method == wire.META_ALIVE:
            alive = pb.ShardAliveRequest.FromString(message)
            self._check(alive.authority)
            return (await self._alive(alive)).SerializeToString()
        if method == wire.META_MOVED:
            moved = MovedRequest.FromString(message)
            self._check(moved.authority)
            return (await self._moved(moved)).SerializeToString()
        request = pb.StandbyRequest.FromString(message)
        self._check(request.authority)

        def decide(pool_map: PoolMap) -> PoolMap:
            if request.up:
                return shards.standby_up(pool_map, request.shard, request.member, request.term, request.epoch)
            return shards.standby_out(pool_map, request.shard, request.member, request.term)

        new = await self._change(decide)
        log.info("standby %d of shard %d is %s", request.member, request.shard, "up" if request.up else "not up any more")
        return pb.StandbyReply(map=encode_map(new)).SerializeToString()

    async def _moved(self, request: MovedRequest) -> MovedReply:
        """Partitions are another shard's from here on, where they are to be. The newest map says what became of it."""
        if len(request.partitions) % 2:
            raise InvalidRequest("partitions are 2 bytes each")
        partitions = struct.unpack(f"<{len(request.partitions) // 2}H", request.partitions)
        if any(partition >= PARTITION_COUNT for partition in partitions):
            raise InvalidRequest("there is no such partition")
        try:
            new = await self._change(lambda newest: moves.moved(newest, request.giver, request.term, request.taker, partitions,
                                                                 request.map_epoch))
        except StaleEpoch as error:
            log.info("%d partitions stay where they are: %s", len(partitions), error)
            new = self._newest()
        return MovedReply(map=encode_map(new))

    async def _alive(self, request: pb.ShardAliveRequest) -> pb.ShardAliveReply:
        pool_map = self._newest()
        shard = shards.shard_of(pool_map, request.shard)
        if request.term == 0 and request.member == shard.member:
            pool_map = await self._change(lambda newest: shards.primary_began(newest, request.shard, request.member))
            shard = pool_map.shard_by_id[request.shard]
            self._heard[shard.id] = shard.term, self._clock.boottime_s()
            log.info("member %d of shard %d is its primary in term %d", shard.member, shard.id, shard.term)
        elif request.term:
            shards.check_term(shard, request.term)
        if request.term and request.member != shard.member:
            raise StaleTerm(f"member {shard.member} is the primary of shard {shard.id} in term {shard.term}, not member "
                            f"{request.member} in term {request.term}")
        reign, withheld = self._leads(), self._is_withheld(shard)
        if request.term and not withheld:
            self._heard[shard.id] = shard.term, self._clock.boottime_s()
            self._ended.pop(shard.id, None)
        lease_s = 0.0 if withheld or reign is None else min(self._lease_s, reign.left_s())
        reply = pb.ShardAliveReply(lease_ms=int(lease_s * 1000),
                                   map=encode_map(pool_map) if pool_map.epoch > request.map_epoch else b"")
        if request.member == shard.member:
            reply.term = shard.term
        return reply

    def _is_withheld(self, shard: Shard) -> bool:
        """Whether another member is being named in the primary's place at this moment, or perhaps was: until it is known it
        gets no lease."""
        term, epoch = self._replacing.get(shard.id, (0, 0))
        if term == shard.term and self._newest().epoch < epoch:
            return True
        self._replacing.pop(shard.id, None)
        return False

    def member_ended(self, shard: int, member: int) -> None:
        """The process of that member has ended: where it was the primary it will not answer before it has asked again."""
        known = self._newest().shard_by_id.get(shard)
        if known is not None and known.member == member:
            self._ended[shard] = known.term
            self._woken.set()

    async def run(self) -> None:
        """Look after the primaries until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._woken.wait(), LOOK_S)
            except TimeoutError:
                pass
            self._woken.clear()
            try:
                await self.run_once()
            except NvpoolError as error:
                log.warning("no primary could be named: %s", error)

    def _begin(self, reign: Reign, now_s: float) -> None:
        """Nobody has been heard in this reign."""
        self._heard.clear()
        for shard in self._newest().shards:
            waits_s = self._lease_s
            if reign.bounded:
                waits_s = 0.0 if shard.node == reign.gone else HEARD_S
            self._heard[shard.id] = shard.term, now_s - self._lease_s + waits_s

    async def run_once(self) -> None:
        """Promote a standby wherever a primary is lost."""
        now_s = self._clock.boottime_s()
        reign = self._leads()
        if reign is None:
            self._heard.clear()
        elif reign is not self._reign:
            self._begin(reign, now_s)
        self._reign = reign
        for shard in self._newest().shards:
            if not shard.standbys:
                continue
            ended = self._ended.get(shard.id) == shard.term
            if not ended:
                if reign is None:
                    continue
                term, heard_s = self._heard.get(shard.id, (0, 0.0))
                if term != shard.term:
                    self._heard[shard.id] = shard.term, now_s  # a new primary: it has a whole lease to be heard
                    heard_s = now_s
                if now_s - heard_s <= self._lease_s:
                    continue
            if not any(standby.state == "up" for standby in shard.standbys):
                continue

            def decide(newest: PoolMap, lost=shard) -> PoolMap:
                known = newest.shard_by_id.get(lost.id)
                if known is None or known.term != lost.term:
                    raise StaleTerm("another has been named, or the shard has left the pool")
                self._replacing[lost.id] = lost.term, newest.epoch + 1
                return shards.primary_lost(newest, lost.id) or newest

            try:
                new = await (self._change_anywhere if reign is None else self._change)(decide)
            except StaleTerm:
                self._ended.pop(shard.id, None)
                continue
            self._heard[shard.id] = new.shard_by_id[shard.id].term, self._clock.boottime_s()
            log.warning("the primary of shard %d, member %d, %s; member %d follows it in term %d", shard.id, shard.member,
                        "has ended" if ended else "was silent for its whole lease", new.shard_by_id[shard.id].member,
                        new.shard_by_id[shard.id].term)
