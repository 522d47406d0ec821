"""Participant in a cross-shard transaction: locks records until the coordinator reports the outcome.

Before a lock is acknowledged, it is durable, and the clients' leases on the locked inodes are recalled. From
then on this shard does not change these records by itself. It applies the effects when it learns that the
transaction is committed, releases the locks when it learns that the transaction will never happen, and asks
the coordinator when it hears nothing. Repeated messages change nothing: if there is no lock, the message was
processed before.

Called by `meta/transactions/service`; the coordinator is on another shard. Owned by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, InvalidRequest, NvpoolError, StaleEpoch, WrongShard
from nvpool.core.ids import inode_number, is_inode_number
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Effect, Kv
from nvpool.meta.state import records
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.record_locks import Hold, Holds, RecordReads, until_free
from nvpool.meta.state.transaction import View
from nvpool.meta.state.transaction_records import (
    TransactionId,
    decode_held,
    encode_held,
    held_key,
    id_of_key,
    partition_of_held,
    range_of,
)
from nvpool.meta.transactions.peer_shards import PeerShards, effects_of, id_message, id_of
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

_log = logging.getLogger(__name__)

ASK_AFTER_S = 2.0
"""Age of a lock after which the participant asks for the outcome. A live coordinator reports it sooner."""
ASK_S = 2.0
ASKED_MAX = 64
"""Highest number of concurrent requests to one coordinator."""
KEYS_MAX = 4096
KEY_BYTES_MIN = 2


async def durable(kv: Kv, sequence: int | None = None) -> None:
    """Return when the change (default: the last) is durable here, and on the standbys if there are any.

    It then survives a power loss, and with standbys the loss of this member.
    """
    sequence = kv.sequence if sequence is None else sequence
    await kv.sync(sequence)
    history = getattr(kv, "history", None)
    if history is not None:
        await history.until(sequence)


class Participant:
    """This shard's part in transactions that other shards coordinate."""

    def __init__(
        self,
        kv: Kv,
        view: View,
        reads: RecordReads,
        holds: Holds,
        numbers: Numbers,
        peers: PeerShards,
        clock: Clock,
        recall: Callable[[int, list[int]], Callable[[], Awaitable] | None],
        orphaned: Callable[[int], None],
    ) -> None:
        """`recall(identity, inodes)` recalls the leases of all other clients.

        It returns a wait for that, if needed.
        """
        self._kv = kv
        self._view = view
        self._reads = reads
        self.holds = holds
        self._numbers = numbers
        self._peers = peers
        self._clock = clock
        self._recall = recall
        self._orphaned = orphaned
        self._asking: set[TransactionId] = set()

    def load(self) -> None:
        """Load the locks that a restart left; unreadable ones are left to fsck."""
        first, end = range_of(records.HELD)
        while pairs := self._kv.scan(first, end, 1000):
            for key, raw in pairs:
                try:
                    order, keys = decode_held(raw)
                    self.holds.take(id_of_key(key), order, keys).durable = True
                except NvpoolError as error:
                    _log.error("a hold is damaged, run fsck: %s", error)
            first = pairs[-1][0] + b"\0"
        for hold in self.holds.by_span.values():
            hold.since_s -= ASK_AFTER_S

    async def hold(self, request: pb.HoldRequest) -> pb.HoldReply:
        """Lock the requested records and return them, with other requested reads.

        Busy: an older transaction has one of the records, or its partition is being migrated; the coordinator
        must release its locks and start again. WrongShard: one of the records is not ours. StaleEpoch: the
        pool has other shards, which may have stripes of a directory too. NoSpace, Fenced.
        """
        span, keys = id_of(request.id), list(request.keys)
        if len(keys) + len(request.births) > KEYS_MAX:
            raise InvalidRequest(f"a request may lock at most {KEYS_MAX} records")
        if any(partition >= PARTITION_COUNT for partition in request.births):
            raise InvalidRequest(f"a new inode needs one of the {PARTITION_COUNT} partitions")
        if any(
            len(key) < KEY_BYTES_MIN
            for key in (*keys, *request.looks, *(asked.first for asked in request.ranges))
        ):
            raise InvalidRequest(f"the key of a record has {KEY_BYTES_MIN} bytes or more")
        if not all(map(is_inode_number, request.named)):
            raise InvalidRequest("invalid directory number")
        while True:
            self._check(request)
            if (closed := self._closed(request)) is not None and not self._is_waited_for(span):
                if span in self.holds.by_span:
                    raise Busy("a record of this change is being migrated", retry_after_s=0.01)
                await until_free(closed)
            elif self._kv.full:
                await self._kv.room()
            elif self._view.next_number + len(request.births) > self._numbers.bounds.inode:
                await self._numbers.more()
            elif (
                other := next(
                    (hold for key in keys if (hold := self.holds.of(key)) is not None and hold.span != span),
                    None,
                )
            ) is not None:
                if not other.gives_way_to(request.order, span):
                    raise Busy("an older transaction has locked a record of this change", retry_after_s=0.01)
                await until_free(other)
            else:
                break
        # Nothing waits from here to the apply.
        births = []
        for partition in request.births:
            births.append(inode_number(partition, self._view.next_number))
            self._view.next_number += 1
        wanted = keys + [records.inode_key(number) for number in births]
        known = self.holds.by_span.get(span)
        if known is None or not known.keys.keys() >= set(wanted):
            hold = self.holds.take(span, request.order, wanted)
            try:
                self._kv.apply([(held_key(span), encode_held(hold.order, list(hold.keys)))], reclaims=True)
            except NvpoolError:
                if not hold.durable:
                    self.holds.release(span)
                raise
            hold.durable = True
        wait = self._recall(
            request.identity,
            [records.inode_of_key(key) for key in keys if records.kind_of(key) == records.INODE],
        )
        if wait is not None:
            await wait()
        await durable(self._kv)
        reply = pb.HoldReply(births=births)
        for key in (*keys, *request.looks):
            raw = self._kv.get(key)
            reply.records.add(key=key, put=raw is not None, value=raw or b"")
        # Reads ignore locks of other transactions: a committed one counts where it was decided, and one that
        # is not committed will find the records that we lock.
        ours = [partition for partition in range(PARTITION_COUNT) if not self._view.is_elsewhere(partition)]
        reply.named.extend(
            any(self._kv.scan(*records.dentry_range(partition, number), 1) for partition in ours)
            for number in request.named
        )
        for asked in request.ranges:
            reply.scans.add(
                pairs=[
                    pb.SpanRecord(key=key, put=True, value=raw)
                    for key, raw in self._kv.scan(asked.first, asked.end, min(asked.limit, KEYS_MAX))
                ]
            )
        return reply

    @staticmethod
    def _partitions(request: pb.HoldRequest) -> set[int]:
        partitions = {
            partition_of_held(key) for key in (*request.keys, *request.looks) if not records.is_part_key(key)
        }
        partitions.update(records.partition_of_key(asked.first) for asked in request.ranges)
        return partitions.union(request.births)

    def _check(self, request: pb.HoldRequest) -> None:
        parts = [records.part_of_key(key) for key in request.keys if records.is_part_key(key)]
        if any(shard != self._view.shard for _, shard in parts):
            raise WrongShard(f"shard {self._view.shard} does not store records of other shards")
        if parts and (others := set(self._view.shards).difference(request.shards)):
            # A shard that has given them partitions knows them, and one of the requested shards has: they may
            # have stripes, too.
            raise StaleEpoch(f"the pool also has the shards {sorted(others)}")
        for partition in self._partitions(request):
            if self._view.is_elsewhere(partition):
                raise WrongShard(f"partition {partition} is not on shard {self._view.shard}")
            if self._reads.closed(partition) is None:
                self._reads.check_partition(partition)

    def _closed(self, request: pb.HoldRequest) -> Hold | None:
        """Lock of a partition of the request that is being migrated, if any."""
        return next(
            (
                closed
                for partition in self._partitions(request)
                if (closed := self._reads.closed(partition)) is not None
            ),
            None,
        )

    def _is_waited_for(self, span: TransactionId) -> bool:
        """Whether the migration waits for this transaction.

        It does if the transaction has a lock in the partitions (`Holds.quiet`). A transaction with locks only
        elsewhere is not waited for: a lock that it takes now would be left behind, and its effects would be
        lost.
        """
        known = self.holds.by_span.get(span)
        return known is not None and any(
            self._reads.closed(partition_of_held(key)) is not None for key in known.keys
        )

    async def settle(self, request: pb.SettleRequest) -> pb.SettleReply:
        span = id_of(request.id)
        while self._kv.full:
            await self._kv.room()
        self.end(span, effects_of(request.effects) if request.decided else [])
        await durable(self._kv)
        return pb.SettleReply()

    def end(self, span: TransactionId, effects: list[Effect]) -> None:
        """Apply the effects and release the locks in one change.

        If the locks are gone, this was done before, and nothing happens.
        """
        hold = self.holds.by_span.get(span)
        if hold is None or not hold.durable:
            return
        count, view = 0, self._view
        for key, value in effects:
            if records.kind_of(key) == records.INODE:
                there = self._kv.get(key) is not None
                count += (value is not None) - there
        made: list[Effect] = [*effects, (held_key(span), None)]
        if count:
            made.append((records.COUNTS_KEY, records.encode_counts(view.inode_count + count)))
        self._kv.apply(made, reclaims=True)
        view.inode_count += count
        view.access.note_effects(effects)
        for key, value in effects:
            if records.kind_of(key) == records.ORPHAN and value is not None:
                self._orphaned(records.inode_of_key(key))
        self.holds.release(span)

    async def run_once(self) -> None:
        """Ask for the outcome of old locks; each coordinator separately, because some may be silent."""
        now_s = self._clock.boottime_s()
        late: dict[int, list[TransactionId]] = {}
        for hold in self.holds.by_span.values():
            if hold.durable and now_s - hold.since_s > ASK_AFTER_S:
                late.setdefault(hold.span.shard, []).append(hold.span)
        await asyncio.gather(*(self._ask(span) for spans in late.values() for span in spans[:ASKED_MAX]))

    async def _ask(self, span: TransactionId) -> None:
        request = pb.OutcomeRequest(id=id_message(span), shard=self._view.shard)
        try:
            reply = await self._peers.ask(span.shard, wire.META_OUTCOME, request, pb.OutcomeReply, ASK_S)
            if reply.outcome == pb.OutcomeReply.UNDECIDED:
                return
            while self._kv.full:
                await self._kv.room()
            self.end(span, effects_of(reply.effects) if reply.outcome == pb.OutcomeReply.DECIDED else [])
        except NvpoolError as error:
            if self._peers.has_left(span.shard):
                # a shard leaves only after all its committed transactions are acknowledged
                self.end(span, [])
                return
            _log.info("what became of a change of shard %d is not known yet: %s", span.shard, error)
