"""Client of the other shards of the pool, which it finds in the pool map.

Requests are not retried here. Each carries the grant of a service, which only processes of the pool can sign;
the receiving service checks it. Used by `coordinator` and `participant`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import InvalidRequest, Unreachable, WrongShard
from nvpool.kv.api import Effect
from nvpool.meta.service_auth import ServiceRight
from nvpool.meta.state.transaction_records import TransactionId
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partition_moves import shards_given
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.target_calls import TargetDialer
from nvpool.rpc.v1 import meta_pb2 as pb

SHARD_MAX = 0xFFFF
"""Highest shard number: keys have two bytes for it."""


class PeerShards:
    """Client of all other shards."""

    def __init__(self, dialer: TargetDialer | None, clock: Clock, right: ServiceRight) -> None:
        self._dialer = dialer
        self._clock = clock
        self._right = right
        self._map: PoolMap | None = None

    def use_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map

    def has_left(self, shard: int) -> bool:
        """Whether the shard has left the pool; this is final, because no number is used twice.

        A shard leaves when all its committed transactions are acknowledged, and it has no locks for others
        (node/admin/shards).
        """
        return (
            self._map is not None and shard not in self._map.shard_by_id and shard <= shards_given(self._map)
        )

    async def ask(self, shard: int, method: int, request: Any, reply_type: Any, wait_s: float) -> Any:
        """Reply of the shard's primary; any NvpoolError.

        Unreachable also if our map does not know the shard yet.
        """
        known = self._map.shard_by_id.get(shard) if self._map is not None else None
        if known is None:
            raise (
                WrongShard(f"shard {shard} has left the pool")
                if self.has_left(shard)
                else Unreachable(f"the pool map at hand has no shard {shard} yet")
            )
        if self._dialer is None:
            raise Unreachable("this shard has no way to others")
        request.authority = self._right()
        reply = await self._dialer.call(
            known.endpoints, method, request.SerializeToString(), deadline_s=self._clock.boottime_s() + wait_s
        )
        return decoded(reply_type, reply.message)


def id_message(span: TransactionId) -> pb.SpanId:
    return pb.SpanId(shard=span.shard, incarnation=span.incarnation, number=span.number)


def id_of(message: pb.SpanId) -> TransactionId:
    """Decode a transaction id. InvalidRequest: no shard has that number."""
    if not 0 < message.shard <= SHARD_MAX:
        raise InvalidRequest(
            f"a change over several shards is decided by a shard from 1 to {SHARD_MAX}, not {message.shard}"
        )
    return TransactionId(message.shard, message.incarnation, message.number)


def effect_messages(effects: Iterable[Effect]) -> list[pb.SpanRecord]:
    return [pb.SpanRecord(key=key, put=value is not None, value=value or b"") for key, value in effects]


def effects_of(records: Iterable[pb.SpanRecord]) -> list[Effect]:
    return [(record.key, record.value if record.put else None) for record in records]
