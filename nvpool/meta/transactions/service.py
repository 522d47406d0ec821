"""Cross-shard transaction service: connects the metadata service with coordinator and participant.

It serves the messages of other shards, and answers only processes that can sign the grant of a service.
Created and owned by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy
from nvpool.kv.api import Kv
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.service_auth import AuthorityCheck
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.record_locks import Holds, RecordReads
from nvpool.meta.state.transaction import View
from nvpool.meta.store_client import Targets
from nvpool.meta.transactions.coordinator import TransactionCoordinator
from nvpool.meta.transactions.participant import Participant
from nvpool.meta.transactions.peer_shards import PeerShards, id_of
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire


class CrossShardTransactions:
    """Cross-shard transactions of one shard, as coordinator and as participant."""

    METHODS = (wire.META_HOLD, wire.META_SETTLE, wire.META_OUTCOME)

    def __init__(
        self,
        shard: int,
        incarnation: int,
        kv: Kv,
        view: View,
        numbers: Numbers,
        targets: Targets,
        clock: Clock,
        secret: bytes,
        spawn: Callable[[Coroutine], asyncio.Task],
        waits: DeferredReplies,
        reads: RecordReads,
        recall: Callable[[int, list[int]], Callable[[], Awaitable] | None],
        orphaned: Callable[[int], None],
    ) -> None:
        self._waits = waits
        self._check = AuthorityCheck(clock, secret)
        self.holds = Holds(reads, view, clock.boottime_s)
        self._peers = PeerShards(targets.dialer, clock, targets.authority)
        self.coordinator = TransactionCoordinator(
            shard, incarnation, kv, view, reads, self.holds, self._peers, clock, spawn
        )
        self.participant = Participant(
            kv, view, reads, self.holds, numbers, self._peers, clock, recall, orphaned
        )
        self.under_way: dict[tuple[int, int], asyncio.Future[None]] = {}
        """By session and slot: cross-shard transactions that run now on behalf of clients."""

    def use_map(self, pool_map: PoolMap) -> None:
        self._peers.use_map(pool_map)

    def load(self) -> None:
        """Resume the transactions that a restart interrupted."""
        self.participant.load()
        self.coordinator.load()

    async def run_once(self) -> None:
        await self.participant.run_once()

    def begin(self, call: Call, place: tuple[int, int], carry_out: Callable[[], Awaitable[None]]) -> None:
        """Start `carry_out`, which answers the call; until it ends, `place` is in `under_way`.

        Busy: too many requests wait already.
        """
        done = self.under_way[place] = asyncio.get_running_loop().create_future()

        def ended() -> None:
            del self.under_way[place]
            done.set_result(None)

        async def run() -> None:
            try:
                await carry_out()
            finally:
                ended()

        try:
            self._waits.add(call, run, lambda: None)
        except Busy:
            ended()
            raise

    def handle(self, call: Call) -> None:
        if call.method == wire.META_HOLD:
            request = pb.HoldRequest.FromString(call.message)
            self._answer(call, request, lambda: self.participant.hold(request))
        elif call.method == wire.META_SETTLE:
            settle = pb.SettleRequest.FromString(call.message)
            self._answer(call, settle, lambda: self.participant.settle(settle))
        else:
            asked = pb.OutcomeRequest.FromString(call.message)
            self._answer(call, asked, lambda: self.coordinator.outcome(id_of(asked.id), asked.shard))

    def _answer(self, call: Call, request: Any, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._check(request.authority)

        async def run() -> None:
            call.reply((await work()).SerializeToString())

        self._waits.add(call, run, lambda: None, may_be_applied=True)

    def counters(self) -> dict[str, float]:
        return {
            "spans": self.coordinator.decided,
            "spans_begun_again": self.coordinator.begun_again,
            "spans_to_tell": self.coordinator.unsettled_count,
            "held": len(self.holds.by_span),
        }
