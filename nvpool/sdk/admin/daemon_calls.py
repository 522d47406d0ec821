"""Requests to one shard or target by its number, for checks and inspection of daemons.

fsck, dump and load, and `nvpool file info` use this module. A target refuses a request while it has no
serving lease. Then the request is repeated until the target's next heartbeat renews that lease. `any_primary`
also repeats requests that any primary of a shard can answer. Steps of a walk are not repeated: only one
primary knows the cursor, so the caller starts the walk again (sdk/admin/snapshot_barrier).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from nvpool.core.errors import NotFound, StaleTenure, Unavailable
from nvpool.rpc.messages.read_write_codec import decoded

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from nvpool.client.pool_client import Client
    from nvpool.poolmap.model import PoolMap, Target
    from nvpool.rpc.api import Buffer

_Reply = TypeVar("_Reply", bound="Message")

STEP_S = 60.0
"""Time limit of one step. The longest step reads 64 MiB from a drive that also serves clients."""
SERVING_LEASE_WAIT_S = 15.0
"""Several lease periods. A target without a lease for that long is out of its chains, or offline."""
AGAIN_S = 0.2
AWAY_S = 15.0
"""Time for a shard to start, fail over to a standby, or leave the pool."""


class AdminCalls:
    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def pool_map(self) -> PoolMap:
        return self._client.pool_map

    async def shard(
        self,
        shard: int,
        method: int,
        request: Message,
        reply_type: type[_Reply],
        payload: Sequence[Buffer] = (),
    ) -> tuple[_Reply, memoryview]:
        """Send a request to the primary of a shard; return the reply and its payload.

        Errors: those of the shard; Unreachable, DeadlineExceeded, Disconnected; NotFound if the pool has no
        such shard. The wait for a primary that does not answer ends when another primary takes over
        (client/rpc/primary_connections).
        """
        primary = self.pool_map.shard_by_id.get(shard)
        if primary is None:
            raise NotFound(f"the pool has no shard {shard}")
        primaries, deadline_s = self._client.vfs.meta.primaries, self._client.clock.boottime_s() + STEP_S
        connection = await primaries.connection(primary, deadline_s)
        reply = await primaries.call(connection, method, request.SerializeToString(), deadline_s, payload)
        return decoded(reply_type, reply.message), reply.payload

    async def any_primary(
        self, shard: int, method: int, request: Message, reply_type: type[_Reply]
    ) -> _Reply:
        """Send a repeatable request to the current primary of a shard; return the reply. If that primary
        fails, the request goes to the next one, until AWAY_S have passed. Errors: those of `shard`."""
        until_s = self._client.clock.boottime_s() + AWAY_S
        while True:
            try:
                return (await self.shard(shard, method, request, reply_type))[0]
            except Unavailable:
                if self._client.clock.boottime_s() >= until_s:
                    raise
                await asyncio.sleep(AGAIN_S)
                await self._client.refresh_map()

    async def target(self, target: int, method: int, request: Message, reply_type: type[_Reply]) -> _Reply:
        """Send a request to a target; return its reply. Errors: those of the target; Unreachable,
        DeadlineExceeded, Disconnected."""
        until_s = self._client.clock.boottime_s() + SERVING_LEASE_WAIT_S
        while True:
            if hasattr(request, "map_epoch"):
                request.map_epoch = self.pool_map.epoch
            daemon = self.pool_map.target_by_id.get(target)
            try:
                return await self._ask(daemon, f"target {target}", method, request, reply_type)
            except StaleTenure:
                if self._client.clock.boottime_s() >= until_s:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def _ask(
        self, daemon: Target | None, name: str, method: int, request: Message, reply_type: type[_Reply]
    ) -> _Reply:
        if daemon is None:
            raise NotFound(f"the pool has no {name}")
        deadline_s = self._client.clock.boottime_s() + STEP_S
        reply = await self._client.dialer.call(
            daemon.endpoints, method, request.SerializeToString(), deadline_s=deadline_s
        )
        answer: _Reply = decoded(reply_type, reply.message)
        return answer
