"""Stores of a simulated pool: the real block store (store/chunks) over a simulated drive and an engine in memory.

A `SimulatedStore` is a target through the deaths of its processes: its drive, the directory of its index, and
the state of its node that a process leaves behind. `open` is the start of a process, with the real recovery.
Used by `sim/pool`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nvpool.core.clock import Clock
from nvpool.core.errors import Unavailable
from nvpool.core.units import BLOCK_BYTES
from nvpool.store.chunks.api import ChunkVersion, StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore, open_index
from nvpool.store.disk.index_records import SEGMENT_BITS
from nvpool.testing.sim.drive import SimulatedDevice, SimulatedDrive
from nvpool.testing.sim.shard_members import MemberDrive, SimulatedEngineRuntime, engine_options
from nvpool.testing.sim.simulated_process import Killed, Process
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

JOURNAL_BYTES = 1 << 18
"""A truncation removes up to 256 records with one change, which must fit an eighth of the journal."""
CACHED_SEGMENTS = 64
"""Few, so that records leave the cache of the index within a simulation."""
CHUNKS_MAX = 1 << 20
SCRUB_BLOCKS = 1 << 30


class _Store(BlockChunkStore):
    """The block store of one process. Its end is the process's: a dead one writes nothing more."""

    def __init__(
        self, process: Process, drive: SimulatedDrive, target: int, options: StoreOptions, clock: Clock
    ) -> None:
        device = SimulatedDevice(drive, process)
        super().__init__(device, drive.block_count, target=target, options=options, clock=clock)
        self._process = process

    async def close(self) -> None:
        if self._process.alive:
            await super().close()
        else:
            await self.abandon()


class SimulatedStore:
    """A target of the pool. `verifiers` has all its write verifiers: more than one if it may have lost writes."""

    def __init__(
        self, loop: VirtualLoop, target: int, directory: Path, capacity_bytes: int, seed: str
    ) -> None:
        self.drive = SimulatedDrive(capacity_bytes // BLOCK_BYTES, f"{seed} drive {target}")
        self.index = MemberDrive(directory / f"store-{target}")
        self.verifiers: set[int] = set()
        self._loop = loop
        self._target = target
        self._store: _Store | None = None
        self._boots = 1
        self._doubted = False
        self._full = False
        self._reserve_blocks = 0

    # -- processes

    async def open(self, process: Process, clock: Clock, on_fence: Callable[[str], None]) -> BlockChunkStore:
        """Open the store in this process as daemons/store does.

        Killed: the process dies meanwhile. Errors as of open_chunk_store.
        """
        options = StoreOptions(
            location_lease_s=0.0, cached_segments=CACHED_SEGMENTS, doubted=self._doubted
        )  # without a descriptor no client of the node could use a location
        store = _Store(process, self.drive, self._target, options, clock)
        store.path, store.kind, store.boot = f"drive-{self._target}", "directory", f"boot {self._boots}"

        def fence(reason: str) -> None:
            self._doubted = True
            on_fence(reason)

        store.on_fence = fence
        floor = SimulatedEngineRuntime(self._loop, process, self.index, self.drive.io_s)
        await open_index(
            store,
            self.index.path,
            engine_options(floor=floor, journal_bytes=JOURNAL_BYTES),
            identity=b"store %d" % self._target,
        )
        self._store, self._doubted = store, False
        self.verifiers.add(store.verifier)
        self._reserve_blocks = store.allocator.reserve_blocks
        self.fill(self._full)
        return store

    async def abandon(self) -> None:
        """Release what a dead process held."""
        store, self._store = self._store, None
        if store is not None:
            with suppress(Killed):
                await store.abandon()

    # -- faults

    def lose_power(self) -> None:
        """Lose unsynced blocks, and unsynced parts of the index's journal. No process has the store open."""
        self._boots += 1
        self._doubted = False  # the mark of a fence is not synced
        self.drive.lose_power()
        self.index.lose_power(self.drive.chance)

    def fill(self, full: bool) -> None:
        """Let the drive have no space for new data, or let it have its space again."""
        self._full = full
        if self._store is not None:
            self._store.allocator.reserve_blocks = self.drive.block_count if full else self._reserve_blocks

    def flip(self, inode: int, index: int, block: int) -> None:
        """Flip one bit of a block of a chunk."""
        self.drive.flip(self._places(inode, index)[block])

    # -- contents

    @property
    def store(self) -> BlockChunkStore:
        """The open store. Unavailable: no process has it open, or the process has fenced it."""
        if self._store is None or self._store.closed or self._store.fenced_because:
            raise Unavailable(f"target {self._target} does not run")
        return self._store

    def chunks(self) -> dict[tuple[int, int], ChunkVersion]:
        """Return the chunks by inode and index. Unavailable as of `store`."""
        found = self.store.versions(None, CHUNKS_MAX).chunks
        return {(chunk.inode, chunk.index): chunk for chunk in found}

    def _places(self, inode: int, index: int) -> dict[int, int]:
        store = self.store
        chunk = store.index.chunk(inode, index)
        places: dict[int, int] = {}
        for number in range(max(1, len(chunk.segments))):
            disk = store.index.segment(chunk, number).disk
            places |= {(number << SEGMENT_BITS) + at: place for at, place in enumerate(disk) if place}
        return places

    def blocks(self, inode: int, index: int) -> dict[int, bytes]:
        """Return the bytes of each block of a chunk that is not a hole. Unavailable as of `store`."""
        return {block: self.drive.block(place) for block, place in self._places(inode, index).items()}

    async def scrubbed(self) -> list[str]:
        """Compare all blocks with their checksums and the free map with the index.

        Returns what contradicts itself. Bad blocks are recorded by the store, which repairs them later.
        Unavailable as of `store`.
        """
        problems, cursor, done = [], b"", False
        while not done:
            try:
                cursor, done, _, _, found, _ = await self.store.scrub(cursor, SCRUB_BLOCKS)
            except Killed:
                raise Unavailable(f"target {self._target} has ended during its scrub") from None
            problems += [f"target {self._target}: {problem}" for problem in found]
        return problems
