"""Which of the targets that hold a chunk is asked: those that answer before those that lately did not, or took much longer than
others; then this host's, then those of its rack, then others; of these the one with fewer of our reads on their way. Among
equals each client takes the same for the same chunk, so that one of them has it in memory. Called by chunkclient. Asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from nvpool.client.data.commit import Stored, WrittenAt
from nvpool.client.data.target_queue import Lane
from nvpool.client.state.attr_cache import OpenInode
from nvpool.client.state.pool_view import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import StaleEpoch
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.layout import chain_of
from nvpool.poolmap.model import Chain, ChainTable, PoolMap, Target

SHUN_S = 2.0
"""A target that did not answer is asked last for so long: a restart takes less, and a map without it comes sooner. So is a slow
one, whose next answers say whether it still is."""
SLOWER = 4.0
"""Times what the quickest target takes: a slow one, where that is more than"""
SLOW_S_MIN = 0.025
"""since what is less may be the size of the reads, or a processor that others use."""
BUSIER = 16
"""Reads on their way more than with another replica, from which on that one is the better one. Less is chance where many read,
and the other one has to bring the chunk from its drive first."""
HERE, SAME_RACK, ELSEWHERE = range(3)
"""How far a target is. A client on a node stands where the map says that node does; others say it in `rack`."""


class Replicas:
    """`rack`: that of this host, where it is no node of the pool."""

    def __init__(self, view: PoolView, clock: Clock, host_id: str, rack: str, lane: Callable[[int], Lane]):
        self._view = view
        self._now_s = clock.boottime_s
        self._host_id = host_id
        self._rack_told = rack
        self._lane = lane
        self._distances: dict[int, int] = {}
        self.several = False
        """Whether any chunk has more than one."""
        self.use_map(view.map)

    def use_map(self, pool_map: PoolMap) -> None:
        here = [node for node in pool_map.nodes if self._host_id and node.host_id == self._host_id]
        rack = here[0].rack if here else self._rack_told
        self._distances = {node.id: HERE if node in here else SAME_RACK if rack and node.rack == rack else ELSEWHERE
                           for node in pool_map.nodes}
        self.several = any(len(chain.targets) > 1 for table in pool_map.tables for chain in table.chains)

    @property
    def pool_map(self) -> PoolMap:
        """The newest."""
        return self._view.map

    # -- who holds what ----------------------------------------------------------------------------------------------------

    def _table(self, file: OpenInode) -> ChainTable:
        table = self._view.map.table_by_id.get(file.layout.table)
        if table is None:
            raise StaleEpoch(f"the pool map does not know chain table {file.layout.table}")
        return table

    def chain(self, file: OpenInode, index: int) -> Chain:
        """Of the chunk. StaleEpoch."""
        return self.of_chain(file, chain_of(file.inode, index))

    def of_chain(self, file: OpenInode, number: int) -> Chain:
        """The chain with this number in the file's table. StaleEpoch."""
        return self._table(file).chains[number]

    def holders(self, file: OpenInode, chunks: range, failures: Mapping[int, int]) -> dict[int, int]:
        """Of each chain that has some of these chunks one target that holds them, of those with the fewest `failures`.
        StaleEpoch."""
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
        """What to flush after a write of the chunk under `cut`, whose chain had at least this epoch."""
        return Stored((file.layout.table, chain_of(file.inode, index)), epoch, cut)

    def all_places(self) -> set[WrittenAt]:
        """What to flush after any write."""
        return {(table.id, number) for table in self._view.map.tables for number in range(len(table.chains))}

    # -- whom to ask -------------------------------------------------------------------------------------------------------

    def distance(self, target: Target) -> int:
        """HERE, SAME_RACK or ELSEWHERE, in the newest map."""
        return self._distances.get(target.node, ELSEWHERE)

    def best(self, targets: Sequence[int], tried: Collection[Lane], turn: int) -> Lane:
        """The lane to ask, not one of `tried` where there is another. `turn`: the same number, the same order of equals."""
        now_s, known = self._now_s(), self._view.map.target_by_id
        found = None
        for number in range(len(targets)):
            target = targets[(turn + number) % len(targets)]
            lane = self._lane(target)
            rank = lane in tried, known[target].state not in ("up", "draining"), lane.shunned_s > now_s, lane.distance
            load = lane.in_flight + len(lane.pending)
            if found is None or rank < found[0] or (rank == found[0] and load + BUSIER <= found[1]):
                found = rank, load, lane
        return found[2]

    def failed(self, lane: Lane) -> bool:
        """It did not answer; whether that is news."""
        now_s = self._now_s()
        news = lane.shunned_s <= now_s
        lane.shunned_s = now_s + SHUN_S
        return news

    def shun_slow(self, lanes: Iterable[Lane]) -> bool:
        """Those that took much longer than the quickest are as those that failed, and learnt anew; whether that is news."""
        known = [lane for lane in lanes if lane.took_s]
        limit_s = max(SLOW_S_MIN, SLOWER * min((lane.took_s for lane in known), default=0.0))
        news = False
        for lane in known:
            if lane.took_s > limit_s:
                lane.took_s = 0.0
                news |= self.failed(lane)
        return news
