"""Partition migration service: follows the pool map, and serves and sends the migration messages.

The messages go to other shards and to the pool map's coordinator. Only processes that can sign the grant of a
service are answered. Created and owned by `meta/server/service`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import Unreachable, WrongShard
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.migration.cleanup import PartitionCleanup
from nvpool.meta.migration.destination import MigrationDestination
from nvpool.meta.migration.sessions import bring_all
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.migration.source import MigrationSource, packed
from nvpool.meta.service_auth import AuthorityCheck, ServiceRight
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.rpc.api import Call
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.target_calls import TargetDialer
from nvpool.rpc.v1 import moving_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

SEND_S = 10.0
ASK_S = 5.0


class MigrationService:
    """Migrations from and to this shard."""

    METHODS = (wire.META_MOVE,)

    def __init__(
        self,
        inside: ShardContext,
        dialer: TargetDialer | None,
        clock: Clock,
        secret: bytes,
        authority: ServiceRight,
        waits: DeferredReplies,
        term: int,
    ) -> None:
        """`term`: the term in which this process serves; 0: the term in the first map."""
        self.inside = inside
        self._dialer = dialer
        self._clock = clock
        self._check = AuthorityCheck(clock, secret)
        self._authority = authority
        self._waits = waits
        self._map: PoolMap | None = None
        self._leaving = PartitionCleanup(inside)
        self.destination = MigrationDestination(inside, self._leaving)
        self.source = MigrationSource(
            inside, self._leaving, send=self._send, ask_moved=self._ask_moved, term=term
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def begin(self, pool_map: PoolMap | None) -> None:
        """Load the migration state at a start, before other records are loaded.

        StaleEpoch: see PartitionCleanup.begin.
        """
        coming = self.destination.begin()
        if pool_map is not None and pool_map.partitions:
            self._leaving.begin(pool_map, coming)
            self._take(pool_map)

    def run(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Background tasks of source and destination."""
        return self.destination.run(), self.source.run()

    def bring_sessions(self) -> None:
        """Merge migrated sessions into sessions that clients have opened here: see `sessions.bring_all`."""
        bring_all(self.inside)

    def use_map(self, pool_map: PoolMap) -> None:
        """Use a newer map: partitions that it takes away are forgotten now, partitions that it gives are
        taken up soon."""
        before = self._map
        if before is None or not pool_map.partitions:
            return
        shard = self.inside.shard
        if before.partitions != pool_map.partitions:
            lost = [
                partition
                for partition, (old, new) in enumerate(
                    zip(before.shard_of_partition, pool_map.shard_of_partition, strict=True)
                )
                if old == shard != new
            ]
            if lost:
                self._leaving.forget(pool_map, lost)
        self._take(pool_map)

    def _take(self, pool_map: PoolMap) -> None:
        self._map = pool_map
        self.destination.use_map(pool_map)
        self.source.use_map(pool_map)

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        request = pb.MoveRequest.FromString(call.message)
        self._check(request.authority)

        async def run() -> None:
            call.reply((await self.destination.take(request, call.payload)).SerializeToString())

        self._waits.add(call, run, lambda: None, may_be_applied=True)

    async def _send(self, destination: int, request: pb.MoveRequest, payload: bytes) -> pb.MoveReply:
        known = self._map.shard_by_id.get(destination)
        if known is None:
            raise WrongShard(f"the pool map has no shard {destination}")
        return await self._call(known.endpoints, wire.META_MOVE, request, pb.MoveReply, SEND_S, payload)

    async def _ask_moved(self, destination: int, partitions: Sequence[int], epoch: int) -> PoolMap:
        shard = self._map.shard_by_id[self.inside.shard]
        request = pb.MovedRequest(
            source=shard.id,
            destination=destination,
            term=self.source.term,
            partitions=packed(partitions),
            map_epoch=epoch,
        )
        keeper = self._map.node_by_id[shard.node].endpoints
        reply = await self._call(keeper, wire.META_MOVED, request, pb.MovedReply, ASK_S)
        return decode_map(reply.map)

    async def _call(
        self,
        endpoints: Sequence[str],
        method: int,
        request: Any,
        reply_type: Any,
        wait_s: float,
        payload: bytes = b"",
    ) -> Any:
        if self._dialer is None:
            raise Unreachable("this shard has no way to others")
        request.authority = self._authority()
        reply = await self._dialer.call(
            tuple(endpoints),
            method,
            request.SerializeToString(),
            (payload,) if payload else (),
            deadline_s=self._clock.boottime_s() + wait_s,
        )
        return decoded(reply_type, reply.message)

    def counters(self) -> dict[str, float]:
        return {
            "partitions_given": self.source.given,
            "partitions_taken": self.destination.taken,
            "partitions_coming": self.destination.coming,
            "partitions_leaving": self._leaving.waiting,
        }
