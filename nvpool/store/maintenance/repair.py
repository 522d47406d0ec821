"""Repair of bad blocks and unreadable chunks from other members of their chain.

A block that does not match its checksum is fetched from another member and rewritten. A chunk with an
unreadable record is fetched completely.

This store's checksum of the block decides, not a version: bytes that match the checksum are the block. One
case differs: if a truncation went through the bad block, no checksum of the remaining bytes exists here. Then
the repair takes the block of a member with the same version of the chunk, since two members never have one
version with different bytes. Readers go to another target in the meantime; the bad block is never returned. A
block that no other member has stays bad and is requested again with growing delays.

`store/maintenance/background` creates the repair. The quarantine wakes it for each bad block, whether a
scrub, a read or a copy found the block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, Fenced, NvpoolError
from nvpool.core.units import BLOCK_BYTES
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.disk.bad_blocks import BadBlock
from nvpool.store.replication.transfer_client import OtherTargets
from nvpool.store.throttle import Throttle

log = logging.getLogger(__name__)

RETRY_S, RETRY_S_MAX = 1.0, 60.0
"""Delay between two attempts.

It doubles each time and starts again with each new map and each newly found block.

The longest delay limits the cost for a pool that cannot repair a thousand bad blocks: one request for each
block to each of two other members.
"""


class Repair:
    def __init__(
        self,
        store: ChunkStore,
        target: int,
        others: OtherTargets,
        clock: Clock,
        throttle: Throttle,
        on_fail: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._store = store
        self._target = target
        self._others = others
        self._clock = clock
        self._throttle = throttle
        self._on_fail = on_fail
        self._map: PoolMap | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task | None = None
        self.repaired_blocks = 0
        self.rebuilt_chunks = 0
        store.on_bad = self._wake.set

    def update_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("target %d: the repair of blocks failed", self._target, exc_info=task.exception())
            self._on_fail(f"the repair of blocks failed: {task.exception()!r}")

    async def _run(self) -> None:
        delay_s = RETRY_S
        while True:
            self._wake.clear()
            left = 0
            try:
                bad = self._store.bad_blocks()
                left = len(bad) - len(await self.repaired(bad)) if bad else 0
            except Fenced:
                return
            except NvpoolError as error:
                log.warning("target %d: bad blocks are left for now: %s", self._target, error)
                left = 1
            if not left:
                delay_s = RETRY_S
            try:
                async with asyncio.timeout(delay_s if left else None):
                    await self._wake.wait()
                await asyncio.sleep(RETRY_S if left else 0)
                delay_s = RETRY_S
            except TimeoutError:
                delay_s = min(delay_s * 2, RETRY_S_MAX)

    async def repaired(self, bad: Iterable[BadBlock]) -> list[BadBlock]:
        """Repair these blocks; return those that are good now.

        Fenced, NoSpace, DriveFailed: from this store.
        """
        found = []
        for one in bad:
            if self._store.unreadable(one.inode, one.index):
                if await self.rebuilt(one.inode, one.index):
                    found.append(one)
                continue
            for source in self._sources(one):
                if await self._mend(one, source):
                    found.append(one)
                    break
        return found

    async def mended(self, inode: int, index: int, block: int) -> bool:
        """Repair this block; return whether it is good now. Errors like `repaired`."""
        return bool(await self.repaired([BadBlock(inode, index, block, "")]))

    async def rebuilt(self, inode: int, index: int, table: int = 0) -> bool:
        """Repair a chunk with an unreadable record; return whether the chunk is readable now.

        Another target of the chain supplied the complete chunk; or this target is only joining the chain, and
        the chain has no such chunk. If `table` is 0, the other targets know the chunk's table. While the
        chunk is unreadable here, no write to it is decided without this target. So the other members have
        exactly what the chain has. Errors like `repaired`.
        """
        for one in [table] if table else sorted(self._map.table_by_id if self._map is not None else ()):
            chain = self._map.chain(one, chain_of(inode, index))
            joins = self._target in chain.joining
            if self._target not in chain.targets and not joins:
                continue
            for source in reversed(chain.targets):
                if source == self._target:
                    continue
                try:
                    (found, *_), _ = await self._others.fetch(source, [(inode, index, one)])
                except NvpoolError as error:
                    log.info(
                        "target %d: chunk %d of inode %d is not to be had from target %d: %s",
                        self._target,
                        index,
                        inode,
                        source,
                        error,
                    )
                    continue
                await self._throttle.take(len(found.copy.content))
                if joins and table and found.damage is None and not found.copy.version:
                    await self._store.discard(inode, index)
                    return True
                if (
                    found.damage is not None
                    or not found.copy.version
                    or found.copy.bad
                    or found.copy.table != one
                ):
                    continue
                if not self._store.unreadable(inode, index) or await self._store.install_over(found.copy):
                    self.rebuilt_chunks += 1
                    log.warning(
                        "target %d: chunk %d of inode %d, which could not be read, is a copy of target %d's now",
                        self._target,
                        index,
                        inode,
                        source,
                    )
                    return True
        return False

    def _sources(self, one: BadBlock) -> list[tuple[int, int]]:
        """Return the (target, table) pairs to ask.

        These are the other holders of the chunk's chain, nearest to the tail first.
        """
        if self._map is None:
            return []
        try:
            table = self._store.table_of(one.inode, one.index)
        except CorruptRecord:  # the contents of the block are unknown
            return []
        if table not in self._map.table_by_id:
            return []
        chain = self._map.chain(table, chain_of(one.inode, one.index))
        return [(target, table) for target in reversed(chain.targets) if target != self._target]

    async def _mend(self, one: BadBlock, source: tuple[int, int]) -> bool:
        target, table = source
        await self._throttle.take(BLOCK_BYTES)
        try:
            fetched = await self._others.blocks(target, (one.inode, one.index, table), one.block, 1)
        except NvpoolError as error:
            log.info(
                "target %d: block %d of chunk %d of inode %d is not to be had from target %d: %s",
                self._target,
                one.block,
                one.index,
                one.inode,
                target,
                error,
            )
            return False
        copy = fetched.copy
        if fetched.damage is not None or copy.bad or copy.runs not in ((), ((one.block, 1),)):
            return False
        if not await self._store.mend(
            one.inode,
            one.index,
            one.block,
            copy.content,
            checksum=bytes(copy.checksums),
            version=copy.version,
        ):
            return False
        self.repaired_blocks += 1
        log.warning(
            "target %d: block %d of chunk %d of inode %d is good again, by a copy of target %d",
            self._target,
            one.block,
            one.index,
            one.inode,
            target,
        )
        return True

    async def close(self) -> None:
        self._store.on_bad = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
