"""Resync of a target with the chains that it joins: compare all chunks with the tail, copy differences.

From the pool map in which a target joins a chain, the target receives every write to the chain, and a source
that answers the target knows that map. So the state of the source when the chunk is requested, and every
later write, are the complete chunk. A chunk is equal in two cases: its version is that of the source's
answer; or the answer was installed over a chunk that did not change between request and installation.

No copy replaces the result of a write, a pull or a truncation made in the meantime: such a chunk is compared
again. The same applies to a chunk with an undecided write at the source, and to a chunk that was truncated or
removed here and not yet at the source (`guard`). Chunks that the source does not have are removed. A version
here above the source's version was never committed and is removed too.

One pass goes through the key space of a source, for all chains that this source can supply, in bounded steps:
compare a page of versions, fetch the differences in batches. When the epoch of a chain changes, the whole
chain is compared again. After an error a pass continues where it stopped, with growing delays. At the end the
copied chunks are flushed; then the chains of the pass are `equal`.

`store/maintenance/background` creates the resync on the store's event loop. The heartbeat code reads its
results (`equal`, `progress`) for the manager.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, CorruptRecord, NoSpace, NvpoolError, Unavailable, WrongTarget
from nvpool.core.units import BLOCK_BYTES
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.api import ChunkCopy, ChunkState, ChunkStore, ChunkVersion
from nvpool.store.replication.tombstones import Tombstones
from nvpool.store.replication.transfer_client import Fetched, OtherTargets
from nvpool.store.replication.transfer_server import FETCH_BYTES, FETCH_CHUNKS_MAX
from nvpool.store.throttle import Throttle

log = logging.getLogger(__name__)

DIFFERING_MAX = 20_000
"""Chunks that may be known to differ before copying starts and the comparison pauses: some MiB of memory."""
BATCHES_IN_PARALLEL = 2
"""One batch is fetched while another is written."""
SOURCES_IN_PARALLEL = 2
AGAIN_S, RETRY_S, RETRY_S_MAX = 0.05, 0.1, 10.0
CHUNK_COST_BYTES = 4096
"""Cost of a chunk besides its bytes, for the throttle."""
PULL_TRIES = 20
PROGRESS_INTERVAL_S = 0.5
"""Shortest time between two sums of the remaining work."""
_LOCAL_STEP = 1024

Chain = tuple[int, int]
"""Chain as (table, number)."""


@dataclass(frozen=True, slots=True)
class ResyncProgress:
    """Progress of the whole current resync of this target.

    `*_left` counts the work known so far; `seconds_left` is -1 while it is unknown.
    """

    chains: int = 0
    chains_equal: int = 0
    chunks_compared: int = 0
    chunks_copied: int = 0
    chunks_removed: int = 0
    chunks_left: int = 0
    bytes_copied: int = 0
    bytes_left: int = 0
    bad_blocks: int = 0
    """Blocks that a source sent as bad."""
    seconds_left: float = -1.0
    waits_for: str = ""
    """Reason why the resync does not progress, as a sentence; empty while it does."""
    lacks_room: bool = False
    """Whether chunks to copy find no space here; the copy is retried."""


class _Differing:
    __slots__ = ("inode", "index", "table", "blocks")

    def __init__(self, inode: int, index: int, table: int, blocks: int) -> None:
        self.inode = inode
        self.index = index
        self.table = table
        self.blocks = blocks

    @property
    def chain(self) -> Chain:
        return self.table, chain_of(self.inode, self.index)


class _Pass:
    """One pass through a source, for these chains at these epochs."""

    def __init__(self, source: int, chains: dict[Chain, int]) -> None:
        self.source = source
        self.chains = chains
        self.after: tuple[int, int] | None = None
        self.page: deque[ChunkVersion] = deque()
        self.page_end: tuple[int, int] | None = None
        self.page_open = False
        self.listed = False
        self.differing: deque[_Differing] = deque()
        self.again: deque[_Differing] = deque()
        """Chunks that could not be made equal when they were processed."""
        self.damaged: dict[_Differing, str] = {}
        """Chunks that the source cannot read."""
        self.waits_for = ""
        """Reason why the last attempt could copy nothing more."""
        self.lacks_room = False
        self.used_bytes = 0
        self.seen_blocks = 0


class Resync:
    def __init__(
        self,
        store: ChunkStore,
        target: int,
        others: OtherTargets,
        clock: Clock,
        throttle: Throttle,
        *,
        on_fail: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._store = store
        self._target = target
        self._others = others
        self._clock = clock
        self._throttle = throttle
        self._on_fail = on_fail
        self.guard = Tombstones()
        self.equal: dict[Chain, int] = {}
        """Joined chains that are complete here, with their epoch at that time. For the manager."""
        self.progress = ResyncProgress()
        self._map: PoolMap | None = None
        self._joining: dict[Chain, tuple[int, int]] = {}  # epoch, source
        self._passes: dict[int, _Pass] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._turns = asyncio.Semaphore(SOURCES_IN_PARALLEL)
        self._changed = asyncio.Event()
        self._began_s = 0.0
        self._began_bytes = 0
        self._last_update_s = 0.0
        self._closed = False

    def update_map(self, pool_map: PoolMap) -> None:
        """Catch up with exactly the chains that this target joins by this map."""
        self._map = pool_map
        self._joining = {
            (table.id, number): (chain.epoch, chain.targets[-1])
            for table in pool_map.tables
            for number, chain in enumerate(table.chains)
            if self._target in chain.joining
        }
        self.equal = {
            chain: epoch
            for chain, epoch in self.equal.items()
            if chain in self._joining and self._joining[chain][0] == epoch
        }
        self.guard.active = bool(self._joining)
        if not self._joining:
            self.guard.forget()
        self._changed.set()
        self._changed = asyncio.Event()
        for source in {source for _, source in self._joining.values()}:
            if source not in self._tasks and self._todo(source) and not self._closed:
                if not self._tasks:
                    self._began_s, self._began_bytes = self._clock.boottime_s(), self.progress.bytes_copied
                task = self._tasks[source] = asyncio.get_running_loop().create_task(self._catch_up(source))
                task.add_done_callback(lambda done, source=source: self._ended(source, done))
        self._update_progress()

    def _ended(self, source: int, task: asyncio.Task) -> None:
        del self._tasks[source]
        if not task.cancelled() and task.exception() is not None:
            log.critical(
                "target %d: catching up with target %d failed",
                self._target,
                source,
                exc_info=task.exception(),
            )
            self._on_fail(f"catching up with target {source} failed: {task.exception()!r}")
        elif not self._closed and self._map is not None and self._todo(source):
            self.update_map(self._map)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_idle(self) -> bool:
        """Whether no source is being caught up with."""
        return not self._tasks

    async def settled(self) -> None:
        """Return when there is nothing to catch up with by the current map. For tests."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
            await asyncio.sleep(0)

    # -- one source ------------------------------------------------------------------------------------------------------

    def _todo(self, source: int) -> dict[Chain, int]:
        return {
            chain: epoch
            for chain, (epoch, its_source) in self._joining.items()
            if its_source == source and self.equal.get(chain) != epoch
        }

    def _valid(self, one: _Pass) -> set[Chain]:
        """Return the chains of the pass that its source can still supply.

        Their epoch must be the one at which the pass began.
        """
        return {
            chain for chain, epoch in one.chains.items() if self._joining.get(chain) == (epoch, one.source)
        }

    async def _catch_up(self, source: int) -> None:
        delay_s = RETRY_S
        try:
            while todo := self._todo(source):
                one = self._passes.get(source)
                if one is None or not self._valid(one):
                    one = self._passes[source] = _Pass(source, todo)
                    log.info("target %d compares %d chains with target %d", self._target, len(todo), source)
                copied = self.progress.chunks_copied + self.progress.chunks_compared
                try:
                    await self._go_through(one)
                    delay_s = RETRY_S
                    if self._passes.get(source) is one:
                        del self._passes[source]
                except NvpoolError as error:
                    if copied != self.progress.chunks_copied + self.progress.chunks_compared:
                        delay_s = RETRY_S
                    one.waits_for = f"target {source}: {error or type(error).__name__}"
                    one.lacks_room = isinstance(error, NoSpace)
                    self._update_progress()
                    await self._pause(delay_s)
                    delay_s = min(delay_s * 2, RETRY_S_MAX)
        finally:
            self._passes.pop(source, None)

    async def _pause(self, delay_s: float) -> None:
        """Wait for `delay_s`, or until the map changes."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changed], timeout=delay_s)
        finally:
            changed.cancel()

    async def _go_through(self, one: _Pass) -> None:
        delay_s = AGAIN_S
        while valid := self._valid(one):
            if self._closed:
                return
            if one.differing and (one.listed or len(one.differing) >= DIFFERING_MAX):
                async with self._turns:
                    await self._settle_some(one)
                one.waits_for, one.lacks_room = "", False
                continue
            if not one.listed:
                async with self._turns:
                    await self._compare(one, ChainSet(valid))
                continue
            await self._note_equal(one)
            if not one.again:
                if one.damaged:
                    text = next(iter(one.damaged.values()))
                    one.differing, one.damaged = deque(one.damaged), {}  # for the next attempt
                    raise Unavailable(text)
                return
            await self._pause(delay_s)
            delay_s = min(delay_s * 2, RETRY_S_MAX)
            one.differing, one.again = one.again, deque()

    async def _note_equal(self, one: _Pass) -> None:
        open_chains = {differing.chain for differing in (*one.again, *one.damaged)}
        done = {
            chain for chain in self._valid(one) - open_chains if self.equal.get(chain) != one.chains[chain]
        }
        if not done:
            return
        await self._store.flush()
        for chain in done & self._valid(one):
            self.equal[chain] = one.chains[chain]
        self._update_progress()
        log.info("target %d has all of %d chains of target %d", self._target, len(done), one.source)

    async def _compare(self, one: _Pass, chains: ChainSet) -> None:
        """Do one step of the comparison."""
        began_s = self._clock.boottime_s()
        busy = False
        if not one.page_open:
            listed = await self._others.versions(one.source, chains, one.after)
            await self._store.raise_cuts(listed.inodes)
            one.page, one.page_end, one.page_open = deque(listed.chunks), listed.end, True
            one.used_bytes, busy = listed.used_bytes, listed.busy
        here = self._store.versions(one.after, _LOCAL_STEP, chains, until=one.page_end)
        end = here.end or one.page_end
        there: list[ChunkVersion] = []
        while one.page and (end is None or one.page[0][:2] <= end):
            there.append(one.page.popleft())
        copies, removals = _differing(there, here.chunks, self.guard.has_cut)
        one.differing.extend(copies)
        one.differing.extendleft(removals)  # first, since removals free space
        one.seen_blocks += sum([chunk.blocks for chunk in there])
        one.after = end
        if end == one.page_end:
            one.page_open = False
            one.listed = end is None
        compared = self.progress.chunks_compared + len(there)
        self.progress = replace(self.progress, chunks_compared=compared)
        self._update_progress(soon=False)
        await self._throttle.take(CHUNK_COST_BYTES + 64 * len(there))
        await self._throttle.leave(self._clock.boottime_s() - began_s, busy)

    # -- copying differences ---------------------------------------------------------------------------------------------

    async def _settle_some(self, one: _Pass) -> None:
        batches = []
        while one.differing and len(batches) < BATCHES_IN_PARALLEL:
            batches.append(self._batch(one.differing))
        outcome = await asyncio.gather(
            *[self._settle(one, batch) for batch in batches], return_exceptions=True
        )
        for error in outcome:
            if isinstance(error, BaseException):
                raise error
        self._update_progress(soon=False)

    @staticmethod
    def _batch(waiting: deque[_Differing]) -> list[_Differing]:
        """Take the chunks of one fetch request."""
        batch: list[_Differing] = []
        byte_count = 0
        while waiting and len(batch) < FETCH_CHUNKS_MAX:
            byte_count += waiting[0].blocks * BLOCK_BYTES
            if batch and byte_count > FETCH_BYTES:
                break
            batch.append(waiting.popleft())
        return batch

    async def _settle(self, one: _Pass, batch: list[_Differing]) -> None:
        """Make these chunks equal, or put them back."""
        left = deque(batch)
        try:
            valid = self._valid(one)
            for gone in [chunk for chunk in left if chunk.chain not in valid]:
                left.remove(gone)
            if not left:
                return
            await self._throttle.take(sum([CHUNK_COST_BYTES + chunk.blocks * BLOCK_BYTES for chunk in left]))
            began_s = self._clock.boottime_s()
            asked = self.guard.came
            # Read before the request: a change in the meantime shows as a different state.
            seen = [await self._state(chunk.inode, chunk.index) for chunk in left]
            fetched, busy = await self._others.fetch(one.source, [(c.inode, c.index, c.table) for c in left])
            ready: list[tuple[_Differing, ChunkCopy, ChunkState]] = []
            for found, before in zip(fetched, seen, strict=False):
                chunk = left[0]
                if self._is_ready(one, chunk, found, before, asked):
                    ready.append((chunk, found.copy, before))
                left.popleft()
            left.extendleft([chunk for chunk, _, _ in reversed(ready)])
            for (chunk, copy, _), is_done in zip(ready, await self._install(ready), strict=True):
                left.remove(chunk)
                if not is_done or not self.guard.allows(copy, asked):
                    one.again.append(chunk)
            await self._throttle.leave(self._clock.boottime_s() - began_s, busy)
        finally:
            one.differing.extendleft(reversed(left))

    async def _state(self, inode: int, index: int) -> ChunkState:
        try:
            return self._store.state(inode, index)
        except CorruptRecord:
            # The chunk here is unreadable, so it has nothing worth keeping; the chain has the chunk.
            await self._store.discard(inode, index)
            return self._store.state(inode, index)

    def _is_ready(
        self, one: _Pass, chunk: _Differing, found: Fetched, before: ChunkState, asked: int
    ) -> bool:
        """Whether to install the chunk.

        Otherwise the chunk is already equal, or is recorded for another attempt.
        """
        if found.damage is not None:
            one.damaged[chunk] = f"chunk {chunk.index} of inode {chunk.inode}: {found.damage}"
            log.error("target %d cannot copy %s", self._target, one.damaged[chunk])
            return False
        now = self._store.state(chunk.inode, chunk.index)
        allowed = self.guard.allows(found.copy, asked)
        if now.version == found.copy.version and allowed:
            return False  # the chunk has arrived in the meantime
        if found.pending or now != before or not allowed:
            one.again.append(chunk)
            return False
        return True

    async def _install(self, ready: list[tuple[_Differing, ChunkCopy, ChunkState]]) -> list[bool]:
        if not ready:
            return []
        try:
            done = await self._store.install([(copy, before) for _, copy, before in ready])
        except (NoSpace, CorruptRecord):
            if len(ready) > 1:  # some of them may still fit
                return [done for one in ready for done in await self._install([one])]
            chunk, copy, before = ready[0]
            try:
                self._store.state(chunk.inode, chunk.index)
                done = await self._store.install([(copy, before)])
            except CorruptRecord:
                await self._store.discard(chunk.inode, chunk.index)
                return [False]
        for (_, copy, _), is_done in zip(ready, done, strict=True):
            if is_done:
                self.progress = replace(
                    self.progress,
                    bytes_copied=self.progress.bytes_copied + len(copy.content),
                    chunks_copied=self.progress.chunks_copied + bool(copy.version),
                    chunks_removed=self.progress.chunks_removed + (not copy.version),
                    bad_blocks=self.progress.bad_blocks + len(copy.bad),
                )
        return done

    # -- single chunks ---------------------------------------------------------------------------------------------------

    async def pull(self, table: int, inode: int, index: int, asked: int = 0) -> int:
        """Fetch the committed state of a chunk now.

        A write is based on a version that is missing here. `asked` is the target that sent this write. The
        source is this target if it holds the chain, else the chain's tail. Returns the version that is here
        afterwards, 0 for none.

        Unavailable, Stale: no source could be asked; nothing was done. Damaged, NoSpace: likewise, and a
        retry will not help soon.
        """
        for _ in range(PULL_TRIES):
            if self._map is None or table not in self._map.table_by_id:
                raise WrongTarget(f"the pool map does not know chain table {table}")
            holders = self._map.chain(table, chain_of(inode, index)).targets
            source = asked if asked in holders else holders[-1]
            if source == self._target:
                return self._store.state(inode, index).version
            asked_at, before = self.guard.came, await self._state(inode, index)
            (found, *_), _ = await self._others.fetch(source, [(inode, index, table)])
            if found.damage is not None:
                raise found.damage
            now = self._store.state(inode, index)
            allowed = self.guard.allows(found.copy, asked_at)
            if now.version == found.copy.version and allowed:
                return now.version
            if now == before and allowed and (await self._store.install([(found.copy, before)]))[0]:
                return found.copy.version
            if now.version > before.version:
                return now.version
            await asyncio.sleep(AGAIN_S)
        raise Busy(f"chunk {index} of inode {inode} did not keep still while it was pulled")

    async def level(self, table: int, inode: int, index: int, source: int) -> int:
        """Fetch the chunk from `source` if the source has a newer version.

        For a member of the chain that lacks data that it should have. Returns the version that is here
        afterwards, 0 for none.

        WrongTarget: one of the two targets does not hold the chain. Busy: the chunk is changing, or was
        truncated here and not yet at the source; nothing was done. Other errors like `pull`.
        """
        if (
            self._map is None
            or table not in self._map.table_by_id
            or not {self._target, source} <= set(self._map.chain(table, chain_of(inode, index)).targets)
        ):
            raise WrongTarget(
                f"target {self._target} and {source} do not both hold chunk {index} of inode {inode}"
            )
        with self.guard.watching():
            asked, before = self.guard.came, self._store.state(inode, index)
            (found, *_), _ = await self._others.fetch(source, [(inode, index, table)])
            if found.damage is not None:
                raise found.damage
            if found.copy.version <= before.version:
                return before.version
            await self._throttle.take(CHUNK_COST_BYTES + len(found.copy.content))
            if (
                found.pending
                or found.copy.known.cut < before.cut
                or not self.guard.allows(found.copy, asked)
                or not (await self._store.install([(found.copy, before)]))[0]
            ):
                raise Busy(f"chunk {index} of inode {inode} does not keep still")
        log.warning(
            "target %d: chunk %d of inode %d, which was not as it should be here, is a copy of target %d's now",
            self._target,
            index,
            inode,
            source,
        )
        return found.copy.version

    # -- progress --------------------------------------------------------------------------------------------------------

    def _update_progress(self, *, soon: bool = True) -> None:
        now_s = self._clock.boottime_s()
        if not soon and now_s - self._last_update_s < PROGRESS_INTERVAL_S:
            return
        self._last_update_s = now_s
        passes = list(self._passes.values())
        waiting = (
            [chunk for one in passes for chunk in (*one.differing, *one.again)] if len(passes) < 3 else []
        )
        left = sum([chunk.blocks for chunk in waiting]) * BLOCK_BYTES
        seconds = -1.0
        worked_s = now_s - self._began_s
        copied = self.progress.bytes_copied - self._began_bytes
        if passes and not all(one.listed for one in passes):
            left += sum([self._unseen_bytes(one) for one in passes if not one.listed])
        if not self._todo_any():
            left, seconds = 0, 0.0
        elif copied and worked_s > 0:
            seconds = left * worked_s / copied
        self.progress = replace(
            self.progress,
            chains=len(self._joining),
            chains_equal=len(self.equal),
            chunks_left=len(waiting),
            bytes_left=left,
            seconds_left=seconds,
            waits_for=next((one.waits_for for one in passes if one.waits_for), ""),
            lacks_room=any(one.lacks_room for one in passes),
        )

    def _todo_any(self) -> bool:
        return any(self.equal.get(chain) != epoch for chain, (epoch, _) in self._joining.items())

    def _unseen_bytes(self, one: _Pass) -> int:
        """Estimate the bytes of the source that are not compared yet.

        The estimate uses this pass's share of all chains that the source holds.
        """
        if self._map is None:
            return 0
        held = sum([one.source in chain.targets for table in self._map.tables for chain in table.chains])
        return max(0, one.used_bytes * len(one.chains) // max(1, held) - one.seen_blocks * BLOCK_BYTES)


def _differing(
    there: Iterable[ChunkVersion], here: Iterable[ChunkVersion], has_cut: Callable[[int], bool]
) -> tuple[list[_Differing], list[_Differing]]:
    """Return the chunks to copy and the chunks to remove.

    Chunks to copy are missing here or have another version here; version 0 counts as missing. Chunks to
    remove are missing there. A truncation gives the next version to every chunk that it touches. So for
    inodes that were truncated here, equal versions prove nothing yet.
    """
    ours = {chunk[:2]: chunk for chunk in here}
    found = []
    for chunk in there:
        own = ours.pop(chunk[:2], None)
        if own is None or own.version != chunk.version or not chunk.version or has_cut(chunk.inode):
            found.append(
                _Differing(chunk.inode, chunk.index, chunk.table or (own.table if own else 1), chunk.blocks)
            )
    return found, [_Differing(chunk.inode, chunk.index, chunk.table or 1, 0) for chunk in ours.values()]
