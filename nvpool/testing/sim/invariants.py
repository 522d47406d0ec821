"""Invariants of a simulated pool that hold at every moment.

Epochs and terms only grow; of two primaries only the later one answers; no acknowledged change is missing
where a primary begins. `sim/pool` reports the events; `problems` are sentences. `sim/linearizability`
checks the replies to clients.
"""

from __future__ import annotations

from collections import deque
from operator import ne

from nvpool.kv.replication.member_engine import MemberKv
from nvpool.poolmap.model import PoolMap

EVENTS_KEPT = 60


class Invariants:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.moved = 0
        """Number of partitions that were handed over."""
        self.answers = 0
        """Number of replies by primaries."""
        self.fast_requests = 0
        """Number of requests that shards took from frames, see meta/server/request_dispatch."""
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        """The last events, for the search for a cause."""
        self._newest: PoolMap | None = None
        self._answered: dict[int, tuple[int, int]] = {}  # shard -> the last term that answered, its member
        self._acknowledged: dict[int, tuple[int, int]] = {}  # shard -> sequence, term
        self._weak: dict[
            int, dict[int, int]
        ] = {}  # shard -> member -> a power loss may have removed changes after this one

    def violated(self, problem: str) -> None:
        self.problems.append(problem)
        self.events.append(f"VIOLATED: {problem}")

    def happened(self, now_s: float, event: str) -> None:
        self.events.append(f"{now_s:10.4f} s  {event}")

    def map_is(self, pool_map: PoolMap) -> None:
        """Record that the coordinator has this map now."""
        before, self._newest = self._newest, pool_map
        if before is None or before is pool_map:
            return
        if pool_map.epoch < before.epoch or (pool_map.epoch == before.epoch and pool_map != before):
            self.violated(f"the map has epoch {pool_map.epoch} after {before.epoch}")
        if pool_map.partitions != before.partitions:
            self.moved += sum(map(ne, before.shard_of_partition, pool_map.shard_of_partition))
        for shard in pool_map.shards:
            old = before.shard_by_id.get(shard.id)
            if old is not None and (shard.term < old.term or shard.epoch < old.epoch):
                self.violated(
                    f"shard {shard.id} has term {shard.term}, epoch {shard.epoch} after {old.term}, {old.epoch}"
                )
            if old is not None and shard.member != old.member and shard.term <= old.term:
                self.violated(f"shard {shard.id} has another primary in the same term {shard.term}")
            up = {shard.member, *(standby.member for standby in shard.standbys if standby.state == "up")}
            weak = self._weak.get(shard.id, {})
            for member in weak.keys() - up:  # not promoted before it has all changes again
                del weak[member]
        for table in pool_map.tables:
            old_table = before.table_by_id.get(table.id)
            for number, chain in enumerate(table.chains if old_table is not None else ()):
                if chain.epoch < old_table.chains[number].epoch:
                    self.violated(
                        f"chain {table.id}/{number} has epoch {chain.epoch} after {old_table.chains[number].epoch}"
                    )

    def followed(self, name: str, before: int, epoch: int) -> None:
        """Record that a process replaces its map of epoch `before` by one of `epoch`."""
        if epoch <= before:
            self.violated(f"{name} is given epoch {epoch} after {before}")

    def answered(self, shard: int, member: int, term: int, committed: int) -> None:
        """Record a reply of a primary, which shows committed changes."""
        self.answers += 1
        last = self._answered.get(shard, (0, member))
        if term < last[0] or (term == last[0] and member != last[1]):
            self.violated(
                f"member {member} of shard {shard} answers in term {term}, member {last[1]} has in term {last[0]}"
            )
        else:
            self._answered[shard] = term, member
        if committed > self._acknowledged.get(shard, (0, 0))[0]:
            self._acknowledged[shard] = committed, term

    def begins(self, shard: int, member: int, kv: MemberKv) -> None:
        """Record that a primary begins to serve with these records."""
        sequence, term = self._acknowledged.get(shard, (0, 0))
        weak = min(self._weak.pop(shard, {}).values(), default=sequence)
        if kv.sequence < min(sequence, weak):
            self.violated(
                f"member {member} of shard {shard} begins term {kv.term} with {kv.sequence} changes, "
                f"{min(sequence, weak)} were acknowledged"
            )
        history = kv.history
        if (
            history is not None
            and weak >= sequence
            and history.base.sequence < sequence <= history.last.sequence
        ):
            its_term = history.term_at(sequence)
            if its_term is not None and its_term > term:
                self.violated(
                    f"member {member} of shard {shard} begins term {kv.term}: change {sequence} is of term "
                    f"{its_term}, one of term {term} was acknowledged"
                )
        if kv.sequence < sequence:
            self._acknowledged[shard] = kv.sequence, kv.term

    def power_lost(self, shard: int, member: int, synced: int) -> None:
        """Record that a member may have lost all changes after `synced`."""
        weak = self._weak.setdefault(shard, {})
        weak[member] = min(weak.get(member, synced), synced)
