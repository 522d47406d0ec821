"""This target's part in the chain of a chunk. The seam where chain replication goes in: with one replica a target is head and
tail, so the write is committed where it is given its version.

The head gives versions (chain epoch from the map, counter from the chunk); successors take what the head gave. Called by
store/service; nobody else writes to the store.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.base.errors import WrongTarget
from nvpool.base.ids import RequestId
from nvpool.logic.layout import chain_of
from nvpool.logic.poolmap import PoolMap
from nvpool.store.chunkstore import ChunkStore, Placed


class Replica:
    def __init__(self, store: ChunkStore):
        self._store = store
        self._chain_epochs: list[int] | None = None

    def update_map(self, pool_map: PoolMap, target: int) -> None:
        """Remember the epoch of each chain that this target is a member of, 0 for the others. With several tables the highest:
        a version's epoch has only to grow."""
        epochs = [0] * len(pool_map.tables[0].chains) if pool_map.tables else []
        for table in pool_map.tables:
            for number, chain in enumerate(table.chains):
                if target in chain.targets:
                    epochs[number] = max(epochs[number], chain.epoch)
        self._chain_epochs = epochs or None

    def write_now(self, inode: int, index: int, offset: int, buffer: memoryview, checksums: bytes, *, cut: int,
                  request: RequestId | None, version: int = 0, placed: Placed | None = None, table: int = 0) -> int:
        """See ChunkStore.write_now. WrongTarget when the chunk's chain is not ours: fetch the map, choose again."""
        return self._store.write_now(inode, index, offset, buffer, checksums, cut=cut, request=request,
                                     epoch=self._epoch(inode, index), version=version, placed=placed, table=table)

    async def copy(self, source: tuple[int, int, int], inode: int, index: int, offset: int, length: int, *, cut: int,
                   request: RequestId | None, given_up: Callable[[], bool], table: int = 0) -> tuple[int, int]:
        """See ChunkStore.copy. WrongTarget when one of the chunks is not ours."""
        self._epoch(*source[:2])
        return await self._store.copy(source, inode, index, offset, length, cut=cut, request=request,
                                      epoch=self._epoch(inode, index), given_up=given_up, table=table)

    def _epoch(self, inode: int, index: int) -> int:
        """Of the chunk's chain."""
        if self._chain_epochs is None:
            return 1
        epoch = self._chain_epochs[chain_of(inode, index)]
        if not epoch:
            raise WrongTarget(f"chunk {index} of inode {inode} belongs to other targets")
        return epoch
