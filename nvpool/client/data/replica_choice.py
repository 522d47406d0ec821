"""Choice of the replica that a read is sent to.

Reads prefer, in this order: targets that have answered lately and were not much slower than others; targets
of this host, then of its rack; targets with fewer reads of this client in flight. Among equals all clients
choose the same target for the same chunk, so one target has the chunk in memory. Used by the chunk client;
sends no request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from nvpool.client.data.read_queue import ReadQueue
from nvpool.client.data.unstable_writes import Stored, WrittenAt
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import StaleEpoch
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import Chain, ChainTable, PoolMap, Target

SHUN_S = 2.0
"""How long a target that did not answer, or was slow, is the last choice.

A restart takes less, and a map without the target comes sooner. The next replies of a slow target show
whether it is still slow.
"""
SLOWER = 4.0
"""Multiple of the quickest target's latency from which on a target is slow, if above SLOW_S_MIN."""
SLOW_S_MIN = 0.025
"""Latency up to which no target is slow.

Smaller differences may come from the sizes of reads, or from a busy processor.
"""
BUSIER = 16
"""Surplus of reads in flight from which on another replica is better.

A smaller surplus is chance when many clients read, and the other target must first read the chunk from its
drive.
"""
HERE, SAME_RACK, ELSEWHERE = range(3)
"""Distance of a target. The map says where a client on a node is; other clients say it in `rack`."""


class Replicas:
    """The replicas of chunks by the newest map.

    `rack`: that of this host, if it is not a node of the pool.
    """

    def __init__(
        self, view: PoolView, clock: Clock, host_id: str, rack: str, lane: Callable[[int], ReadQueue]
    ):
        self._view = view
        self._now_s = clock.boottime_s
        self._host_id = host_id
        self._configured_rack = rack
        self._lane = lane
        self._distances: dict[int, int] = {}
        self.several = False
        """Whether any chunk has more than one replica."""
        self.choices: dict[int, tuple[ReadQueue, ...]] = {}
        """For chains by table * CHAINS_PER_TABLE + number: the target queue to use for each turn, without
        regard to load. Valid until `choices_until_s`. Compiled reads use it as `choose` does."""
        self.choices_until_s = inf
        self.use_map(view.map)

    def use_map(self, pool_map: PoolMap) -> None:
        here = [node for node in pool_map.nodes if self._host_id and node.host_id == self._host_id]
        rack = here[0].rack if here else self._configured_rack
        self._distances = {
            node.id: HERE if node in here else SAME_RACK if rack and node.rack == rack else ELSEWHERE
            for node in pool_map.nodes
        }
        self.several = any(len(chain.targets) > 1 for table in pool_map.tables for chain in table.chains)
        self._forget_choices()

    @property
    def pool_map(self) -> PoolMap:
        """The newest pool map."""
        return self._view.map

    # -- chains --------------------------------------------------------------------------------------------------------

    def _table(self, file: OpenInode) -> ChainTable:
        table = self._view.map.table_by_id.get(file.layout.table)
        if table is None:
            raise StaleEpoch(f"the pool map does not know chain table {file.layout.table}")
        return table

    def chain(self, file: OpenInode, index: int) -> Chain:
        """The chain of the chunk. StaleEpoch."""
        return self.of_chain(file, chain_of(file.inode, index))

    def of_chain(self, file: OpenInode, number: int) -> Chain:
        """The chain with this number in the file's table. StaleEpoch."""
        return self._table(file).chains[number]

    def holders(self, file: OpenInode, chunks: range, failures: Mapping[int, int]) -> dict[int, int]:
        """One target for each chain that has some of these chunks, one with the fewest `failures`.

        StaleEpoch.
        """
        chains = self._table(file).chains
        numbers: Collection[int] = range(CHAINS_PER_TABLE)
        if len(chunks) < CHAINS_PER_TABLE:
            numbers = {chain_of(file.inode, index) for index in chunks}
        found = {}
        for number in numbers:
            found[number] = min(chains[number].readable, key=lambda target: failures.get(target, 0))
        return found

    @staticmethod
    def stored(file: OpenInode, index: int, epoch: int, cut: int) -> Stored:
        """The unstable write for a write to the chunk under truncate number `cut`.

        `epoch`: a lower bound of the epoch of the chain at the write.
        """
        return Stored((file.layout.table, chain_of(file.inode, index)), epoch, cut)

    def all_places(self) -> set[WrittenAt]:
        """All chains: the places to commit if any of them may have been written."""
        return {(table.id, number) for table in self._view.map.tables for number in range(len(table.chains))}

    # -- choice --------------------------------------------------------------------------------------------------------

    def distance(self, target: Target) -> int:
        """HERE, SAME_RACK or ELSEWHERE, in the newest map."""
        return self._distances.get(target.node, ELSEWHERE)

    def choose(self, file: OpenInode, index: int) -> ReadQueue:
        """The target queue of the chunk's best replica; as `best`, with the choices for its chain cached.

        StaleEpoch: the map knows no chain of this number, or none of its targets can be read.
        """
        until_s = self.choices_until_s
        if until_s < inf and self._now_s() >= until_s:
            self._forget_choices()
        turn, number = file.inode + index, chain_of(file.inode, index)
        key = file.layout.table * CHAINS_PER_TABLE + number
        choices = self.choices.get(key)
        if choices is None:
            targets = self.of_chain(file, number).readable
            if not targets:
                raise StaleEpoch(f"no target of chain {number} can be read; a newer map may have one")
            choices = self.choices[key] = tuple(
                self._first_of(targets, first) for first in range(len(targets))
            )
        lane = choices[turn % len(choices)]
        if len(choices) == 1 or lane.in_flight + len(lane.pending) < BUSIER:
            return lane  # no other target can have BUSIER fewer
        return self.best(self.of_chain(file, number).readable, (), turn)

    def _first_of(self, targets: Sequence[int], turn: int) -> ReadQueue:
        """The target queue to use for this turn, without regard to load."""
        if len(targets) == 1:
            return self._lane(targets[0])
        now_s = self._now_s()
        ranked = list(self._ranked(targets, (), turn, now_s))
        for _, lane in ranked:
            if lane.shunned_s > now_s:
                self.choices_until_s = min(self.choices_until_s, lane.shunned_s)
        return min(ranked, key=lambda each: each[0])[1]  # the first of equals

    def _forget_choices(self) -> None:
        self.choices.clear()
        self.choices_until_s = inf

    def _ranked(
        self, targets: Sequence[int], tried: Collection[ReadQueue], turn: int, now_s: float
    ) -> Iterable[tuple[tuple, ReadQueue]]:
        """Rank and queue of each target, in the order of the turn. The least rank is the best."""
        known = self._view.map.target_by_id
        for number in range(len(targets)):
            target = targets[(turn + number) % len(targets)]
            lane = self._lane(target)
            yield (
                (
                    lane in tried,
                    known[target].state not in ("up", "draining"),
                    lane.shunned_s > now_s,
                    lane.distance,
                ),
                lane,
            )

    def best(self, targets: Sequence[int], tried: Collection[ReadQueue], turn: int) -> ReadQueue:
        """The target queue to use, not one of `tried` if there is another.

        Equal `turn` gives the same order of equals.
        """
        found = None
        for rank, lane in self._ranked(targets, tried, turn, self._now_s()):
            load = lane.in_flight + len(lane.pending)
            if found is None or rank < found[0] or (rank == found[0] and load + BUSIER <= found[1]):
                found = rank, load, lane
        return found[2]

    def failed(self, lane: ReadQueue) -> bool:
        """Record that the target did not answer; return whether that is news."""
        now_s = self._now_s()
        news = lane.shunned_s <= now_s
        lane.shunned_s = now_s + SHUN_S
        if news:
            self._forget_choices()
        return news

    def shun_slow(self, lanes: Iterable[ReadQueue]) -> bool:
        """Treat targets much slower than the quickest as failed, and measure them again.

        Returns whether any of them did not count as failed before.
        """
        known = [lane for lane in lanes if lane.took_s]
        limit_s = max(SLOW_S_MIN, SLOWER * min((lane.took_s for lane in known), default=0.0))
        news = False
        for lane in known:
            if lane.took_s > limit_s:
                lane.took_s = 0.0
                news |= self.failed(lane)
        return news
