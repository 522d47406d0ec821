"""This target's role in the chains of its chunks: single member, head or successor.

In a chain with one member, the target is head and tail. So `write_now` commits a write in the step that gives
it a version, at no extra cost. For a chunk with several members (`is_shared`), `store/replication/chain_writes`
handles the writes. The callers are `store/server/service` and `store/server/writes`. No other code writes
client data to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import BytesLost, NotSupported, WrongTarget
from nvpool.core.ids import RequestId
from nvpool.poolmap import file_layout
from nvpool.poolmap.chains.protocol import ChainPosition, Offer, place_in
from nvpool.poolmap.model import PoolMap
from nvpool.security.xts import BlockCipher
from nvpool.store.chunk_write import ChunkWrite, Placed
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.replication.chain_writes import ChainWrites, OnDecided, OnEnd, Pending, ReplicaRepairs
from nvpool.store.replication.lost_blocks import LostBlocks
from nvpool.store.replication.peer_connections import PeerDialer, ReplicaPeers


class Replica:
    """Role of this target in its chains.

    Without `dialer` and `repairs` other targets cannot be reached, so this target does not write chunks that they
    hold too.
    """

    def __init__(
        self,
        store: ChunkStore,
        target: int,
        clock: Clock,
        secret: bytes,
        *,
        dialer: PeerDialer | None = None,
        repairs: ReplicaRepairs | None = None,
        ask_map: Callable[[], None] = lambda: None,
        holds_lease: Callable[[], bool] = lambda: True,
    ):
        """`holds_lease` says whether the serving lease of this target holds."""
        self._store, self._writer = store, store.writer
        self._target = target
        self.chain_epochs: dict[int, list[int]] | None = None
        """Epochs of the chains by table.

        0 stands for a chain without this target. Table 0 has the highest epoch of all tables.
        """
        self.places: dict[int, list[ChainPosition | None]] = {}
        """Position of this target in each chain, by table. None stands for a chain without this target."""
        self.shares = False
        """Whether any chain of this target has another member."""
        self.losing = LostBlocks(store, target)
        self.peers: ReplicaPeers | None = None
        self.writes: ChainWrites | None = None
        if dialer is not None and repairs is not None:
            self.peers = ReplicaPeers(target, dialer, clock, secret)
            self.writes = ChainWrites(
                store,
                target,
                self.peers,
                clock,
                repairs,
                place_of=self.place,
                ask_map=ask_map,
                holds_lease=holds_lease,
            )
        self.pending: dict[tuple[int, int], Pending] = {} if self.writes is None else self.writes.pending
        """Chunks with an undecided write."""

    def update_map(self, pool_map: PoolMap) -> None:
        """Record the position of this target in each chain.

        For a chunk with an unknown table the highest epoch counts: the epoch in a version only has to grow.
        """
        self.places = {}
        self.losing.update_map(pool_map)
        for table in pool_map.tables:
            self.places[table.id] = [place_in(chain, self._target) for chain in table.chains]
        by_table = {
            table: [place.epoch if place is not None else 0 for place in places]
            for table, places in self.places.items()
        }
        highest = [max(epochs) for epochs in zip(*by_table.values(), strict=True)]
        self.chain_epochs = {0: highest} | by_table if by_table else None
        self.shares = any(
            place is not None and len(place.members) > 1
            for places in self.places.values()
            for place in places
        )
        if self.peers is not None:
            self.peers.use_map(pool_map)
            self.writes.map_changed()

    def place(self, table: int, inode: int, index: int) -> ChainPosition | None:
        """Return the position of this target in the chunk's chain."""
        places = self.places.get(table or 1)
        return places[file_layout.chain_of(inode, index)] if places is not None else None

    def is_full_member(self, number: int) -> bool:
        """Whether this target is a full member of this chain in each table."""
        return all(
            (place := places[number]) is not None and place.number < place.full
            for places in self.places.values()
        )

    # -- writing -----------------------------------------------------------------------------------------------------

    def is_shared(self, table: int, inode: int, index: int) -> bool:
        """Whether writes to the chunk need other members, by `lead`. WrongTarget: its chain is not ours."""
        place = self.place(table, inode, index)
        if place is None:
            raise WrongTarget(f"chunk {index} of inode {inode} belongs to other targets")
        return len(place.members) > 1 or (inode, index) in self.pending

    def try_submit(self, write: ChunkWrite, on_end: OnEnd) -> bool:
        """See ChainWrites.try_submit."""
        return self.writes is not None and self.writes.try_submit(write, on_end)

    async def lead(self, write: ChunkWrite, deadline_s: float) -> int:
        """See ChainWrites.lead."""
        if self.writes is None:
            raise NotSupported("this store does not reach the other targets of the chunk")
        return await self.writes.lead(write, deadline_s)

    def follow(self, offer: Offer, link: int, write: ChunkWrite, on_decided: OnDecided) -> int:
        """See ChainWrites.follow."""
        if self.writes is None:
            raise NotSupported("this store does not take part in chains")
        return self.writes.follow(offer, link, write, on_decided)

    def write_now(self, write: ChunkWrite, placed: Placed | None) -> int:
        """See ChunkStore.write_now; only for a chunk that is not shared. `placed`: its staged blocks.

        WrongTarget: the chunk's chain is not ours; fetch the map and choose the target again.
        """
        return self._writer.write_now(write, self._epoch(write.table, write.inode, write.index), 0, placed)

    async def copy(
        self,
        source: tuple[int, int, int],
        inode: int,
        index: int,
        offset: int,
        length: int,
        *,
        cut: int,
        request: RequestId | None,
        given_up: Callable[[], bool],
        table: int = 0,
    ) -> tuple[int, int]:
        """See ChunkStore.copy.

        WrongTarget: the chain of one of the chunks is not ours. NotSupported: the chunk is shared. BytesLost:
        data of one of the chunks may be lost.
        """
        epoch = self._epoch(table, inode, index)

        def is_over() -> bool:
            """Whether the caller no longer wants the copy.

            Also raises the errors of `copy`: the chunk may have become shared while the copy waited.
            """
            self._epoch(0, source[0], source[1])
            if any(self.losing.since(0, *name) is not None for name in (source[:2], (inode, index))):
                raise BytesLost("chunks of which something was lost are copied by reading and writing them")
            if (self.shares and self.is_shared(table, inode, index)) or self._epoch(
                table, inode, index
            ) != epoch:
                raise NotSupported("chunks with several replicas are copied by reading and writing them")
            return given_up()

        is_over()
        return await self._store.copy(
            source,
            inode,
            index,
            offset,
            length,
            cut=cut,
            request=request,
            epoch=epoch,
            given_up=is_over,
            table=table,
        )

    def _epoch(self, table: int, inode: int, index: int) -> int:
        """Return the epoch of the chunk's chain.

        Returns the highest epoch of any table if the table is 0, unknown, or not in our map.
        """
        if self.chain_epochs is None:
            return 1
        epochs = self.chain_epochs.get(table or self._store.table_of(inode, index)) or self.chain_epochs[0]
        epoch = epochs[file_layout.chain_of(inode, index)]
        if not epoch:
            raise WrongTarget(f"chunk {index} of inode {inode} belongs to other targets")
        return epoch

    def may_locate(self, table: int, inode: int, index: int, blocks: int) -> bool:
        """Whether a client that reads the drive directly finds the right bytes there."""
        return (inode, index) not in self.pending and not self.losing.is_lost(table, inode, index, 0, blocks)

    # -- waiting for pending writes ----------------------------------------------------------------------------------

    def is_pending(self, names: Iterable[tuple[int, int]]) -> bool:
        """Whether a write to any of these chunks is undecided."""
        return any(name in self.pending for name in names)

    def settling(self) -> set[tuple[int, int]]:
        """See ChainWrites.settling."""
        return self.writes.settling() if self.pending else set()

    async def decided(self, names: Iterable[tuple[int, int]], deadline_s: float) -> None:
        """Wait for the pending writes to these chunks. Busy: ask another target."""
        decisions = self.writes.undecided(names)
        if decisions:
            await self.writes.wait_to_read(decisions, deadline_s)

    async def cut(
        self, inode: int, size: int, cut: int, chunk_bits: int, end: int, cipher: BlockCipher | None = None
    ) -> int:
        """See ChunkStore.cut.

        A chunk may become shared during the wait, so writes are refused in every case.
        """
        if self.writes is None:
            return await self._store.cut(inode, size, cut, chunk_bits, end, cipher)
        await self.writes.begin_cut([inode], cut)
        try:
            return await self._store.cut(inode, size, cut, chunk_bits, end, cipher)
        finally:
            self.writes.end_cut([inode], cut)

    async def remove(self, inodes: list[int]) -> tuple[int, int]:
        """See ChunkStore.remove."""
        if self.writes is None:
            return await self._store.remove(inodes)
        await self.writes.begin_cut(inodes, 0)
        try:
            return await self._store.remove(inodes)
        finally:
            self.writes.end_cut(inodes, 0)

    async def close(self) -> None:
        if self.writes is not None:
            await self.writes.close()
