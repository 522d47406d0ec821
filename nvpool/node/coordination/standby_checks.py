"""Checks of standbys by the leader: whether one may be promoted, and which ones make no progress.

`has_records` is called before a promotion, so that a member without records never becomes primary.
`StuckStandbys` finds standbys that should catch up and have made no progress for the pool's replace_after_s:
their records are missing, damaged, or on a failing drive, although the drive is in use.
poolmap/shards/placement places them elsewhere. Used by node/supervisor, node/coordination/shard_members and
the simulation.
"""

from __future__ import annotations

import asyncio
from math import inf

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.poolmap.model import PoolMap, Shard
from nvpool.poolmap.shards.members import endpoints_of
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2

ASK_S = 1.0
RECORDS_S = 0.5
"""Time limit of `has_records`.

It is clearly shorter than a node waits for the leader to answer a forwarded request
(node/coordination/leadership), since the request of a starting primary is answered after this check. A
connection that takes longer is made all the same."""
LOOK_S = 5.0
"""Interval of checks of the standbys that catch up."""
_HAS = {
    "standby": True,
    "promoting": True,
    "serving": True,
    "waiting": True,
    "filling": False,
    "empty": False,
    "lost": False,
}


async def member_status(
    dialer: Dialer, clock: Clock, shard: Shard, member: int, wait_s: float = ASK_S
) -> meta_pb2.MetaStatusReply | None:
    """Return the status of a member, or None if it sends none within `wait_s`."""
    try:
        reply = await dialer.call(
            endpoints_of(shard, member),
            wire_pb2.META_STATUS,
            meta_pb2.MetaStatusRequest().SerializeToString(),
            deadline_s=clock.boottime_s() + wait_s,
        )
        return decoded(meta_pb2.MetaStatusReply, reply.message)
    except NvpoolError:
        return None


async def has_records(dialer: Dialer, clock: Clock, shard: Shard, member: int) -> bool | None:
    """Return whether a standby has all its records; None: it does not answer, or its drive is missing."""
    status = await member_status(dialer, clock, shard, member, RECORDS_S)
    return None if status is None else _HAS.get(status.state)


class StuckStandbys:
    """Standbys that have been `syncing` without progress for `replace_after_s` while their primary serves."""

    def __init__(self, dialer: Dialer, replace_after_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._dialer = dialer
        self._replace_after_s = replace_after_s or inf
        self._clock = clock
        self._seen: dict[tuple[int, int], tuple[tuple[str, float], float]] = {}
        """(shard, member) -> its state and last change, and since when they are the same."""
        self._looked_s = -inf

    def forget(self) -> None:
        """Drop the state because this node does not lead: the leader measures the time."""
        self._seen.clear()

    async def look(self, pool_map: PoolMap) -> frozenset[tuple[int, int]]:
        """(shard, member) of the standbys that must be replaced."""
        now_s = self._clock.boottime_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            await self._look(pool_map, now_s)
        return frozenset(
            name for name, (_, since_s) in self._seen.items() if now_s - since_s > self._replace_after_s
        )

    async def _look(self, pool_map: PoolMap, now_s: float) -> None:
        syncing = [
            (shard, standby.member)
            for shard in pool_map.shards
            for standby in shard.standbys
            if standby.state == "syncing" and standby.endpoints
        ]
        asked = {shard.id: shard for shard, _ in syncing}
        primaries = dict(
            zip(
                asked,
                await asyncio.gather(*(self._status(shard, shard.member) for shard in asked.values())),
                strict=True,
            )
        )
        answers = await asyncio.gather(*(self._status(*one) for one in syncing))
        seen = {}
        for (shard, member), status in zip(syncing, answers, strict=True):
            primary = primaries[shard.id]
            if primary is None or primary.state != "serving":
                continue  # there is no primary that could fill it
            mark = (
                (status.state, status.counters["kv_sequence"] + status.counters["kv_layer_entries"])
                if status is not None
                else ("silent", 0.0)
            )
            before = self._seen.get((shard.id, member))
            seen[shard.id, member] = before if before is not None and before[0] == mark else (mark, now_s)
        self._seen = seen

    async def _status(self, shard: Shard, member: int) -> meta_pb2.MetaStatusReply | None:
        return await member_status(self._dialer, self._clock, shard, member)
