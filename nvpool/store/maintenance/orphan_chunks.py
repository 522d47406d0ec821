"""Removal of orphan chunks: chunks of chains that this target no longer belongs to.

A chain belongs to this target while the map names the target anywhere in the chain, also in its goal. A
chain's chunks are removed at the earliest STAY_S after the target left the chain: by then no client uses a
map or a location lease that leads here. On a drained target the administrator waits for the target to become
empty, so the delay is DRAINED_STAY_S. This covers the location leases; a client with an older map is refused.

A chunk may have a version from a later epoch of the chain than our map knows. An earlier process of this
target may have known a newer map that assigns the chunk to this target; then the chunk must stay. Or the
epoch is that of another chain of the file, as older builds gave it after truncations; then the chunk must go.
The version does not say which. So such a chunk is removed only once our map is known to be at least as new as
every map that this target ever followed (serving lease, is_caught_up).

The chunk itself records its chain table, from the grant under which it was written. A chunk with a table that
the map does not have stays. An unreadable chunk goes if the target is in no chain of its number in any table.

`store/maintenance/background` creates the removal; its task calls `run_once`, and tests call it directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from nvpool.core.clock import Clock
from nvpool.core.errors import Fenced, NvpoolError
from nvpool.core.ids import version_parts
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.throttle import Throttle

ChainName = tuple[int, int]
"""Chain as (table, number)."""

log = logging.getLogger(__name__)

STAY_S = 60.0
"""Time from leaving a chain to the removal of its chunks.

The time is longer than the lifetime of a location lease (5 s), and than a client waits before it fetches the
map again.
"""
DRAINED_STAY_S = 10.0
LATE_S = 600.0
"""Age from which an orphan counts as stuck: `leaves` then returns False."""
AGAIN_S = 30.0
"""Interval between passes on a drained target that is not empty.

The passes find chunks that arrived later.
"""
CHUNK_COST_BYTES = 64 << 10
"""Cost of a removal for the throttle: two thousand removals a second at the default rate."""
_STEP = 256
RETRY_S = 5.0


class OrphanChunks:
    def __init__(
        self,
        store: ChunkStore,
        target: int,
        clock: Clock,
        throttle: Throttle,
        on_fail: Callable[[str], None] = lambda reason: None,
        *,
        is_caught_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the removal.

        `is_caught_up` returns whether our map is at least as new as every map that an earlier process of this
        target followed.
        """
        self._store = store
        self._target = target
        self._clock = clock
        self._throttle = throttle
        self._on_fail = on_fail
        self._is_caught_up = is_caught_up
        self._draining = False
        self._holds_none = False
        """Whether this target belongs to no chain."""
        self._epochs: dict[ChainName, int] = {}
        self._lost_s: dict[ChainName, float] = {}
        """Chains without this target, and the time since when."""
        self._open: set[ChainName] = set()
        """Those of these chains that may still have chunks here."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task | None = None
        self.removed_chunks = 0
        self.removed_bytes = 0
        self.left_chunks = 0
        """Due chunks that the last pass left here."""
        self._failed = ""
        self._looked_again = False

    @property
    def _stay_s(self) -> float:
        return min(STAY_S, DRAINED_STAY_S) if self._draining else STAY_S

    def update_map(self, pool_map: PoolMap) -> None:
        now_s = self._clock.boottime_s()
        own = pool_map.target_by_id.get(self._target)
        self._draining = own is not None and own.desired_state != "share"
        self._looked_again = self._looked_again and self._draining
        for table in pool_map.tables:
            for number, chain in enumerate(table.chains):
                name = table.id, number
                self._epochs[name] = chain.epoch
                if (
                    self._target in chain.targets
                    or self._target in chain.joining
                    or self._target in chain.goal
                ):
                    self._lost_s.pop(name, None)
                    self._open.discard(name)
                elif name not in self._lost_s:
                    self._lost_s[name] = now_s
                    self._open.add(name)
        self._holds_none = len(self._lost_s) == len(self._epochs)
        self._changed.set()
        if self._open and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("target %d: removing orphan chunks failed", self._target, exc_info=task.exception())
            self._on_fail(f"removing orphan chunks failed: {task.exception()!r}")

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            wait_s: float | None = None
            if self._open:
                wait_s = self._due_in_s()
                if not wait_s:
                    try:
                        await self.run_once()
                        self._failed = ""
                        wait_s = RETRY_S if self._open else None
                    except Fenced:
                        return
                    except NvpoolError as error:
                        log.warning("target %d: orphan chunks are left for now: %s", self._target, error)
                        self._failed = f"removing chunks failed: {error or type(error).__name__}"
                        wait_s = RETRY_S
            if wait_s is None and self._draining and self._holds_none and self._store.status()["used_bytes"]:
                wait_s = AGAIN_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                if not self._open and self._draining and self._holds_none:
                    self._open.update(self._lost_s)
                    self._looked_again = True

    def _due_in_s(self) -> float:
        return max(
            0.0, min([self._lost_s[name] for name in self._open]) + self._stay_s - self._clock.boottime_s()
        )

    @property
    def waits_for(self) -> str:
        """Reason why orphan chunks stay here, as a sentence; empty: they are being removed."""
        if self._failed:
            return self._failed
        if self.left_chunks:
            return f"{self.left_chunks} chunks are kept until this target hears from the leading node"
        if self._open and (due_in_s := self._due_in_s()):
            return f"chunks are kept for {due_in_s:.0f} s more, for clients with an older map or location"
        if not self._open and self._looked_again and (used := self._store.status()["used_bytes"]):
            return f"{used} bytes belong to no chunk; give them back with: nvpool fsck POOL --repair"
        return ""

    async def run_once(self) -> int:
        """Remove the chunks of chains that the target left long enough ago; return their number."""
        due = {name for name in self._open if self._is_due(name)}
        before, left = self.removed_chunks, 0
        skipped: set[ChainName] = set()
        after = None
        wanted = ChainSet(due)
        while due:
            step = self._store.versions(after, _STEP, wanted)
            for chunk in step.chunks:
                name = chunk.table, chain_of(chunk.inode, chunk.index)
                is_wanted = partial(self._goes, name, chunk.version)
                if not is_wanted():
                    if self._is_due(name):
                        skipped.add(name)
                        left += 1
                    continue
                await self._throttle.take(CHUNK_COST_BYTES)
                began_s = self._clock.boottime_s()
                # Decided in the step that removes: during the wait the chain may have become ours again.
                self.removed_bytes += await self._store.discard(chunk.inode, chunk.index, is_wanted)
                self.removed_chunks += is_wanted()
                await self._throttle.leave(self._clock.boottime_s() - began_s)
            after = step.end
            if after is None:
                break
            await self._throttle.take(CHUNK_COST_BYTES)
        self.left_chunks = left
        self._open -= {name for name in due - skipped if name in self._lost_s}
        if self.removed_chunks > before:
            log.info(
                "target %d: %d chunks of chains that it left are removed",
                self._target,
                self.removed_chunks - before,
            )
        return self.removed_chunks - before

    def _goes(self, name: ChainName, version: int) -> bool:
        """Whether to remove a chunk of the chain with this version now.

        Version 0 means an unreadable chunk.
        """
        if not self._is_due(name):
            return not version and self._are_due(name[1])
        return version_parts(version)[0] <= self._epochs[name] or self._is_caught_up()

    def leaves(self, name: ChainName) -> bool:
        """Whether chunks of this chain are orphans that will go by themselves.

        False for long overdue ones.
        """
        return name in self._open and self._clock.boottime_s() < self._lost_s[name] + LATE_S

    def _is_due(self, name: ChainName) -> bool:
        lost_s = self._lost_s.get(name)
        return lost_s is not None and lost_s + self._stay_s <= self._clock.boottime_s()

    def _are_due(self, number: int) -> bool:
        """Whether the chains of this number are due in all tables."""
        return all(self._is_due(name) for name in self._epochs if name[1] == number)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
