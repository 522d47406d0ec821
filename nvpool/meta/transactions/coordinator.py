"""Coordinator of a cross-shard transaction: two phases; a transaction that is not committed never happened.

    gather    prepare: the records of other shards that the decision reads are locked there (HOLD, durable)
              and sent here
    decide    the decision runs over these records and our own, which are not locked. When all records are
              here, the decision runs again, without a wait up to the commit. Our part therefore sees every
              earlier change, as an ordinary change does
    commit    our effects, the slot's stored answer and the decision (the effects for other shards) are one
              change of our engine. At this point the whole transaction has happened; the client is answered
    settle    when the commit is durable, the other shards are notified (SETTLE) until each has acknowledged
              that its part is done, durably; then the decision is deleted. After a restart this continues

A transaction that is not committed leaves nothing here. A participant that asks for its outcome is answered
that it will never happen; this is true for every transaction of an earlier process without a stored decision.

If two transactions want the same record, the older one waits, and the younger one releases all its locks and
starts again. So no two transactions wait for each other. Used by `meta/server/service` and
`meta/transactions/service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, NvpoolError, Stale, Unavailable
from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.kv.api import Effect, Kv
from nvpool.meta.state import records
from nvpool.meta.state.record_locks import Holds, LockedRecord, RecordReads, until_free
from nvpool.meta.state.transaction import Decision as Decide
from nvpool.meta.state.transaction import Draft, TruncationInProgress, View, WaitFirst
from nvpool.meta.state.transaction_records import (
    NO_TURN,
    TURN_HERE,
    TURN_KEY,
    TURN_LAST,
    Decision,
    TransactionId,
    decided_key,
    decode_decision,
    encode_decision,
    id_of_key,
    range_of,
)
from nvpool.meta.transactions.lock_prediction import foreseen
from nvpool.meta.transactions.participant import durable
from nvpool.meta.transactions.peer_shards import PeerShards, effect_messages, id_message
from nvpool.meta.transactions.view import (
    CrossShardTransaction,
    Need,
    Range,
    TransactionView,
    partition_of_range,
)
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

_log = logging.getLogger(__name__)

HOLD_S = 5.0
"""Timeout of one HOLD; a participant waits at most three seconds for a dead client."""
SPAN_S = 10.0
"""Limit for the phases before the commit. After it the client gets Unavailable and retries, and other
transactions get a turn."""
SETTLE_S = 5.0
PAUSE_S, PAUSE_S_MAX = 0.005, 0.5
ROUNDS_MAX = 100_000
"""Limit for the rounds of gathering records; no path is deeper."""


class _ShardRequest:
    """Records that one HOLD requests from a shard."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.looks: list[bytes] = []
        self.ranges: list[Range] = []
        self.births: list[int] = []
        self.named: list[int] = []


class TransactionCoordinator:
    """Coordinator of the cross-shard transactions that this shard decides."""

    def __init__(
        self,
        shard: int,
        incarnation: int,
        kv: Kv,
        view: View,
        reads: RecordReads,
        holds: Holds,
        peers: PeerShards,
        clock: Clock,
        spawn: Callable[[Coroutine], asyncio.Task],
    ) -> None:
        self._shard = shard
        self._incarnation = incarnation
        self._kv = kv
        self._view = view
        self._reads = reads
        self._holds = holds
        self.peers = peers
        self._clock = clock
        self._spawn = spawn
        self._number = 0
        self.active: set[TransactionId] = set()
        self._decisions: dict[TransactionId, Decision] = {}
        self._settling: set[asyncio.Task] = set()
        self.decided = self.begun_again = 0

    def load(self) -> None:
        """Resume the notifications that a restart interrupted."""
        first, end = range_of(records.DECIDED)
        while pairs := self._kv.scan(first, end, 1000):
            for key, raw in pairs:
                try:
                    span, decision = id_of_key(key), decode_decision(raw)
                except NvpoolError as error:
                    _log.error("a decision over several shards is damaged, run fsck: %s", error)
                    continue
                if decision.turn == TURN_HERE:
                    self._holds.take(span, 0, [TURN_KEY])
                self.start_settling(span, decision)
            first = pairs[-1][0] + b"\0"

    # -- up to the decision --------------------------------------------------------------------------------------------

    def begin(self, identity: int) -> CrossShardTransaction:
        """Start a transaction on behalf of that client. The caller must call `end` in every case."""
        self._number += 1
        span = CrossShardTransaction(
            TransactionId(self._shard, self._incarnation, self._number), self._clock.wall_ns(), identity
        )
        self.active.add(span.id)
        return span

    def end(self, span: CrossShardTransaction) -> None:
        """End a transaction; if it was not committed, release its locks at all shards that can be reached."""
        if not span.decided:
            self._give_back(span)
        self.active.discard(span.id)

    async def decide(self, span: CrossShardTransaction, decide: Decide, request: Any) -> Draft:
        """Draft of the transaction; all records of other shards that it needs are locked.

        Nothing has waited since it was decided. A caller that continues without a wait may commit it; a
        caller that waits must decide again.

        Refused      as raised by the decision
        Unavailable  for SPAN_S a participant did not answer, other transactions were in the way, or a
                     truncation was in progress
        """
        until_s = self._clock.boottime_s() + SPAN_S
        for _ in range(ROUNDS_MAX):
            try:
                if not span.shards and (need := foreseen(self._view, request)) is not None:
                    raise need
                return decide(TransactionView(self._view, span), request, self._clock.wall_ns())
            except Need as need:
                await self._gather(span, need, until_s)
            except LockedRecord as held:
                if (span.shards or span.turn) and not held.hold.gives_way_to(span.order, span.id):
                    await self._begin_again(span, until_s)
                await until_free(held.hold)
            except WaitFirst as first:
                self._give_back(span)
                await first.wait()
            except TruncationInProgress as wait:
                self._give_back(span)
                try:
                    async with asyncio.timeout(max(0.0, until_s - self._clock.boottime_s())):
                        await asyncio.shield(self._view.cutting[wait.inode])
                except TimeoutError:
                    raise Unavailable(
                        f"inode {wait.inode} is still being truncated", retry_after_s=0.2
                    ) from None
        raise Unavailable(f"the records of a cross-shard change were not gathered in {ROUNDS_MAX} rounds")

    async def _gather(self, span: CrossShardTransaction, need: Need, until_s: float) -> None:
        """Lock and fetch what the decision needs.

        On Busy and other passing errors it starts again, up to a limit.
        """
        if need.turn and await self._turn_here(span, until_s):
            return
        asked = self._by_shard(need)
        try:
            await _all([self._hold(span, shard, what) for shard, what in asked.items()])
        except (Unavailable, Stale) as error:
            await self._begin_again(span, until_s, error)
        else:
            if need.turn:
                span.turn = self._root_shard()

    def _root_shard(self) -> int:
        return self._view.owner_of(partition_of(ROOT_INODE))

    async def _turn_here(self, span: CrossShardTransaction, until_s: float) -> bool:
        """Take the turn if this shard gives it; return whether it does.

        On return we have the turn, or have started again.
        """
        if self._root_shard() != self._shard:
            return False
        other = self._holds.of(TURN_KEY) or self._reads.closed(partition_of(ROOT_INODE))
        if other is None:
            self._holds.take(span.id, span.order, [TURN_KEY])
            span.turn = self._shard
        elif other.gives_way_to(span.order, span.id):
            await until_free(other)
        else:
            await self._begin_again(span, until_s)
            if not other.done.done():
                await until_free(other)
        return True

    def _by_shard(self, need: Need) -> dict[int, _ShardRequest]:
        owner_of, asked = self._view.owner_of, {}

        def of(shard: int) -> _ShardRequest:
            return asked.setdefault(shard, _ShardRequest())

        for key in need.keys:
            of(self._owner(key)).keys.append(key)
        for key in need.looks:
            of(owner_of(records.partition_of_key(key))).looks.append(key)
        for wanted in need.ranges:
            of(owner_of(partition_of_range(wanted))).ranges.append(wanted)
        for partition in need.births:
            of(owner_of(partition)).births.append(partition)
        for directory, shard in need.named:
            of(shard).named.append(directory)
        if need.turn:
            of(self._root_shard()).keys.append(TURN_KEY)
        return asked

    def _owner(self, key: bytes) -> int:
        """Shard that stores the record; this shard for its own records, except stripes of directories."""
        if records.is_part_key(key):
            return records.part_of_key(key)[1]
        return self._shard if key[0] & 0x80 else self._view.owner_of(records.partition_of_key(key))

    async def _hold(self, span: CrossShardTransaction, shard: int, what: _ShardRequest) -> None:
        request = pb.HoldRequest(
            id=id_message(span.id),
            order=span.order,
            keys=what.keys,
            looks=what.looks,
            births=what.births,
            identity=span.identity,
            named=what.named,
        )
        if any(map(records.is_part_key, what.keys)):
            request.shards.extend(self._view.shards)
        for first, end, limit in what.ranges:
            request.ranges.add(first=first, end=end, limit=limit)
        span.shards.add(shard)
        reply = await self.peers.ask(shard, wire.META_HOLD, request, pb.HoldReply, HOLD_S)
        found = {record.key: record.value if record.put else None for record in reply.records}
        span.records.update((key, found[key]) for key in what.keys)
        span.looks.update((key, found[key]) for key in what.looks)
        for wanted, scan in zip(what.ranges, reply.scans, strict=True):
            span.ranges[wanted] = [(pair.key, pair.value) for pair in scan.pairs]
        span.births.update(zip(what.births, reply.births, strict=True))
        span.named.update(
            ((number, shard), found) for number, found in zip(what.named, reply.named, strict=True)
        )
        span.records.update((records.inode_key(number), None) for number in reply.births)

    async def _begin_again(
        self, span: CrossShardTransaction, until_s: float, error: NvpoolError | None = None
    ) -> None:
        """Release all locks and start again after a pause.

        If the time is over, this raises Unavailable with `error`, or because other transactions are in the
        way.
        """
        self._give_back(span)
        self.begun_again += 1
        span.tries += 1
        if self._clock.boottime_s() >= until_s:
            raise Unavailable(
                f"cross-shard change not done yet: {error or 'other transactions have locked its records'}",
                retry_after_s=0.2,
            )
        longest = min(PAUSE_S_MAX, PAUSE_S * 2 ** min(span.tries, 10))
        if not isinstance(error, Busy | None):
            longest = max(longest, 0.1)
        await asyncio.sleep(longest * (0.5 + self._clock.random().random()) / 1.5)

    def _give_back(self, span: CrossShardTransaction) -> None:
        if span.turn == self._shard:
            self._holds.release(span.id)
        for shard in span.shards:
            self._spawn(self._release_locks_at(span.id, shard))
        if span.shards:
            # The next attempt needs a new id: the message that this attempt is over may arrive after the next
            # locks.
            self.active.discard(span.id)
            self._number += 1
            span.id = TransactionId(self._shard, self._incarnation, self._number)
            self.active.add(span.id)
        span.clear()

    async def _release_locks_at(self, span: TransactionId, shard: int) -> None:
        try:
            await self.peers.ask(
                shard, wire.META_SETTLE, pb.SettleRequest(id=id_message(span)), pb.SettleReply, SETTLE_S
            )
        except NvpoolError as error:
            _log.info("shard %d will ask for the outcome of a transaction: %s", shard, error)

    # -- from the decision on --------------------------------------------------------------------------------------------

    def split(
        self, span: CrossShardTransaction, draft: Draft
    ) -> tuple[dict[bytes, bytes | None], Decision | None]:
        """Split the draft: our effects, with the decision among them, and the decision.

        The decision is None if no other shard has effects. A caller that cannot apply them calls
        `not_written` if it is certain that nothing was written. An engine that fails may have written them.
        """
        ours: dict[bytes, bytes | None] = {}
        others: dict[int, list[Effect]] = {}
        owner_of = self._view.owner_of
        for key, value in draft.finish().items():
            owner = self._owner(key)
            if owner == self._shard:
                ours[key] = value
            else:
                others.setdefault(owner, []).append((key, value))
        draft.orphans = [number for number in draft.orphans if owner_of(partition_of(number)) == self._shard]
        if not others and span.turn in (0, self._shard):
            return ours, None
        span.decided = True  # from here on only a caller that knows that nothing was written may reset this
        turn = NO_TURN
        if span.turn == self._shard:
            turn = TURN_HERE
        elif span.turn:
            turn = TURN_LAST
            others[span.turn] = others.pop(span.turn, [])  # moved to the end of the order
        decision = Decision(turn, others)
        ours[decided_key(span.id)] = encode_decision(decision)
        return ours, decision

    def not_written(self, span: CrossShardTransaction) -> None:
        """Note that the engine has refused the change of `split`: no part of it exists anywhere."""
        span.decided = False

    def committed(self, span: CrossShardTransaction, decision: Decision | None) -> None:
        """Note that the change of `split` has just been applied, and start to notify other shards."""
        if decision is None:
            return
        self.decided += 1
        for shard in span.shards - decision.effects.keys():
            # this shard has no effects; it only releases its locks
            self._spawn(self._release_locks_at(span.id, shard))
        self.start_settling(span.id, decision)

    def start_settling(self, span: TransactionId, decision: Decision) -> None:
        """Report the outcome to all shards of the transaction, in the background until each has answered or left."""
        self._decisions[span] = decision
        task = self._spawn(self._settle_all(span, decision))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle_all(self, span: TransactionId, decision: Decision) -> None:
        # Only after the commit is durable: effects at other shards cannot be undone.
        await durable(self._kv)
        shards = list(decision.effects)
        last = [shards.pop()] if decision.turn == TURN_LAST else []
        for together in (shards, last):
            await asyncio.gather(*(self._settle(span, shard, decision.effects[shard]) for shard in together))
        while self._kv.full:
            await self._kv.room()
        self._kv.apply([(decided_key(span), None)], reclaims=True)
        del self._decisions[span]
        if decision.turn == TURN_HERE:
            self._holds.release(span)

    async def _settle(self, span: TransactionId, shard: int, effects: list[Effect]) -> None:
        request = pb.SettleRequest(id=id_message(span), decided=True, effects=effect_messages(effects))
        pause_s = PAUSE_S
        # a shard leaves only after it has done its part; its reply was lost
        while not self.peers.has_left(shard):
            try:
                await self.peers.ask(shard, wire.META_SETTLE, request, pb.SettleReply, SETTLE_S)
                return
            except NvpoolError as error:
                _log.log(
                    logging.WARNING if pause_s == PAUSE_S_MAX else logging.DEBUG,
                    "shard %d has not been notified of a change yet: %s",
                    shard,
                    error,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def outcome(self, span: TransactionId, shard: int) -> pb.OutcomeReply:
        """Outcome of a transaction for `shard`, which has locks for it."""
        if span in self.active and span not in self._decisions:
            return pb.OutcomeReply(outcome=pb.OutcomeReply.UNDECIDED)
        await durable(self._kv)
        decision = self._decisions.get(span)
        if decision is None or shard not in decision.effects:
            return pb.OutcomeReply(outcome=pb.OutcomeReply.NEVER)
        return pb.OutcomeReply(
            outcome=pb.OutcomeReply.DECIDED, effects=effect_messages(decision.effects[shard])
        )

    async def wait_settled(self) -> None:
        """Return when all participants have been notified of all committed transactions."""
        while self._settling:
            await asyncio.wait(self._settling)

    @property
    def unsettled_count(self) -> int:
        """Committed transactions of which some participant has not been notified yet."""
        return len(self._decisions)


async def _all(works: list[Coroutine]) -> None:
    """Run all to their ends, so that no request continues unnoticed; then raise the first error."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(error, BaseException):
            raise error
