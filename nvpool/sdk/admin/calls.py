"""Questions to one shard or target of a pool by its number: for checks and inspection, which concern daemons and not files.

Called by checkup, dumpfile and describe. Repeated here is what a target may not answer for a moment, until its next sign of
life is answered, and what any primary of a shard can answer (`any_primary`). Steps of a walk are not: its cursor is known to
one primary only, so whoever wanted it begins it anew (sdk/admin/snapshot_barrier).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from nvpool.core.errors import NotFound, StaleTenure, Unavailable
from nvpool.rpc.messages.data_codec import decoded

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from nvpool.client.session import Client
    from nvpool.poolmap.model import PoolMap, Target
    from nvpool.rpc.api import Buffer

_Reply = TypeVar("_Reply", bound="Message")

STEP_S = 60.0
"""For one step: the longest reads 64 MiB from a drive that also serves others."""
TENURE_S = 15.0
"""Several leases: whoever has none again by then is out of the chains, or away."""
AGAIN_S = 0.2
AWAY_S = 15.0
"""For a shard that is just starting, being followed by a standby, or leaving the pool."""


class Asking:
    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def pool_map(self) -> PoolMap:
        return self._client.pool_map

    async def shard(self, shard: int, method: int, request: Message, reply_type: type[_Reply],
                    payload: Sequence[Buffer] = ()) -> tuple[_Reply, memoryview]:
        """(answer, its payload). Errors as the shard says; Unreachable, DeadlineExceeded, Disconnected.

        A primary that does not answer is given up as soon as another one follows it (client/rpc/primary_connections).
        """
        primary = self.pool_map.shard_by_id.get(shard)
        if primary is None:
            raise NotFound(f"the pool has no shard {shard}")
        primaries, deadline_s = self._client.vfs.meta.primaries, self._client.clock.boottime_s() + STEP_S
        connection = await primaries.connection(primary, deadline_s)
        reply = await primaries.call(connection, method, request.SerializeToString(), deadline_s, payload)
        return decoded(reply_type, reply.message), reply.payload

    async def any_primary(self, shard: int, method: int, request: Message, reply_type: type[_Reply]) -> _Reply:
        """The answer, perhaps by the next primary of the shard: only for what may be repeated. Errors as `shard`, after
        AWAY_S."""
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
        """The answer. Errors as the target says; Unreachable, DeadlineExceeded, Disconnected."""
        until_s = self._client.clock.boottime_s() + TENURE_S
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

    async def _ask(self, daemon: Target | None, name: str, method: int, request: Message, reply_type: type[_Reply]) -> _Reply:
        if daemon is None:
            raise NotFound(f"the pool has no {name}")
        deadline_s = self._client.clock.boottime_s() + STEP_S
        reply = await self._client.dialer.call(daemon.endpoints, method, request.SerializeToString(), deadline_s=deadline_s)
        answer: _Reply = decoded(reply_type, reply.message)
        return answer
