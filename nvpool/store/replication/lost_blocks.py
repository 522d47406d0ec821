"""Lost data of this target's chains (poolmap/chains/data_loss): distinguishes lost blocks from holes.

A chain loses data with its former members. A missing block of such a chain is either a hole or lost. The
users are `store/server/service`, `store/server/writes` and `store/replication/role`, in the step in
which they look at the store.
"""

from __future__ import annotations

from nvpool.core.errors import BytesLost, CorruptRecord
from nvpool.core.ids import version
from nvpool.core.units import BLOCK_BITS, BLOCK_BYTES
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import Loss, PoolMap
from nvpool.store.chunks.api import ALL_INODES, ChunkStore, ReadBatch
from nvpool.store.chunks.read_batch import READ, RESULT

Owners = tuple[list[int], list[int]]
"""For each grant of a read batch: the inode or ALL_INODES, and its chain table (0: unknown)."""


class LostBlocks:
    """Lost data by chain. False if nothing was lost: then no check is needed."""

    def __init__(self, store: ChunkStore, target: int) -> None:
        self._store = store
        self._target = target
        self.chains: dict[int, dict[int, tuple[int, Loss]]] = {}
        """Table -> chain with lost data -> (lowest version given since the loss, the loss)."""

    def __bool__(self) -> bool:
        return bool(self.chains)

    def update_map(self, pool_map: PoolMap) -> None:
        self.chains = {}
        if pool_map.losses:
            for table in pool_map.tables:
                for number, chain in enumerate(table.chains):
                    if chain.loss and self._target in (*chain.targets, *chain.joining):
                        lost = version(chain.begun, 0), pool_map.losses[chain.loss - 1]
                        self.chains.setdefault(table.id, {})[number] = lost

    def since(self, table: int, inode: int, index: int) -> int | None:
        """Return the lowest version of the chunk given after its chain lost data.

        None if the chain has not lost data of the inode. Table 0 means any table.
        """
        if not self.chains:
            return None
        number = chain_of(inode, index)
        for chains in self.chains.values() if not table else (self.chains.get(table, {}),):
            since, loss = chains.get(number, (0, None))
            if loss is not None and loss.had(inode):
                return since
        return None

    def is_lost(self, table: int, inode: int, index: int, first: int, count: int) -> bool:
        """Whether any of these blocks may be lost: a missing block looks the same as a hole."""
        since = self.since(table, inode, index)
        if since is None:
            return False
        try:
            if self._store.held(inode, index).version < since:
                return True
            here = self._store.extents(inode, index, index + 1)[0]
        except CorruptRecord:
            return False  # the read of the chunk reports this error
        return (
            sum(max(0, min(begin + length, first + count) - max(begin, first)) for _, begin, length in here)
            < count
        )

    def check_write(self, table: int, inode: int, index: int, offset: int, length: int, is_all: bool) -> bool:
        """Check a write to the chunk; return whether a remainder of the chunk must be discarded first.

        BytesLost: the write changes a part of a block whose other bytes may be lost. `is_all` says that the
        file has no other bytes in these blocks.
        """
        since = self.since(table, inode, index)
        if since is None or not length:
            return False
        if not is_all and any(
            place % BLOCK_BYTES and self.is_lost(table, inode, index, place >> BLOCK_BITS, 1)
            for place in (offset, offset + length)
        ):
            raise BytesLost(
                f"the block of chunk {index} of inode {inode} that is written in part was lost with its drives"
            )
        try:
            return 0 < self._store.held(inode, index).version < since
        except CorruptRecord:
            return False

    def without_lost(self, reads: bytes, owners: list[int], tables: list[int]) -> tuple[bytes, list[int]]:
        """Replace reads with lost blocks by empty reads.

        Returns the new headers, and the numbers of the replaced reads.
        """
        if not self.chains:
            return reads, []
        headers, lost = bytearray(reads), []
        for number, (inode, index, offset, length, grant, flags) in enumerate(READ.iter_unpack(reads)):
            if (
                grant < len(owners)
                and owners[grant] in (inode, ALL_INODES)
                and self.is_lost(tables[grant], inode, index, offset >> BLOCK_BITS, length >> BLOCK_BITS)
            ):
                READ.pack_into(headers, number * READ.size, inode, index, 0, 0, grant, flags)
                lost.append(number)
        return bytes(headers), lost

    @staticmethod
    def refuse(batch: ReadBatch, lost: list[int]) -> None:
        """Set the result of these reads to BytesLost."""
        for number in lost:
            RESULT.pack_into(batch.results, number * RESULT.size, BytesLost.wire_code, 0, 0, 0)
