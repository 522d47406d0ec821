"""The client's session at one shard: its request slots and its open files. Owned by the metadata client."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from nvpool.client.state.leases import ShardWatch
from nvpool.core.ids import COUNTER_BITS

_COUNTER_BITS = COUNTER_BITS


class ShardSession:
    """The state of a session at one shard."""

    def __init__(self, shard: int):
        self.shard = shard
        self.session = 0
        self.secret = b""
        self.lease_s = 60.0
        self.incarnation = 0
        self.met: object = None  # the connection over which the session was confirmed
        self.meeting: asyncio.Task | None = None
        self.slots: deque[tuple[int, int]] = deque()  # free slots, each with its last used sequence
        self.waiting: deque[asyncio.Future] = deque()  # tasks that wait for a slot
        # of the session: slots of earlier ones are not released to it
        self.generation = 0
        self.open: dict[int, int] = {}  # inode -> registrations
        # whether the shard lacks some of `open`: new session or restart
        self.unnamed = False
        self.released: list[int] = []
        self.leaving: list[list[int]] = []  # batches of `released` in flight
        self.held = b""  # the shard's last list of files open for this client
        # files that the shard holds open and this client does not: inode -> (handles, slots in use at that
        # time)
        self.doubts: dict[int, tuple[int, frozenset[int]]] = {}
        self.opening: asyncio.Task | None = None
        self.renewal: asyncio.Task | None = None
        self.releasing: asyncio.Task | None = None
        self.watch = ShardWatch()
        self.watching: asyncio.Task | None = None
        self.unreported: dict[int, int] = {}  # part of `open` that was not reported to the shard
        self.reporting: asyncio.Task | None = None
        self.report_now = asyncio.Event()
        self.record = -1  # record in the mount state
        # session and secret of the previous process, to continue
        self.earlier: tuple[int, bytes] | None = None
        # part of `open` from another shard, to be reported here
        self.arrived: dict[int, int] = {}
        self.naming: asyncio.Task | None = None
        self.slot_count = 0
        # the generation that continues the previous process's session
        self.taken_up = -1
        # slot -> sequence of requests that the kernel may replay
        self.early: dict[int, int] = {}
        self.given_up: list[int] = []  # slots of `early` without a replay, to be reported

    @property
    def in_use(self) -> bool:
        """Whether a change is in flight."""
        return bool(self.session) and len(self.slots) + len(self.early) < self.slot_count

    def add_open(self, inode: int) -> None:
        """Record one more registration of an open inode."""
        opens = self.open
        opens[inode] = opens.get(inode, 0) + 1

    def add_unreported_open(self, inode: int) -> None:
        """As `add_open`, for a registration that the shard does not know yet."""
        self.add_open(inode)
        unreported = self.unreported
        unreported[inode] = unreported.get(inode, 0) + 1

    def remove_opens(self, inode: int, count: int) -> int:
        """Remove this many registrations of an inode. Returns how many of them the shard may know."""
        opens = self.open
        left = opens.get(inode, 0) - count
        if left > 0:
            opens[inode] = left
        else:
            opens.pop(inode, None)
        unreported = self.unreported.pop(inode, 0)
        if unreported > count:
            self.unreported[inode] = unreported - count
            return 0
        return count - unreported

    def wake(self) -> None:
        """Wake the first task that waits for a slot."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        while self.waiting:
            self.wake()


class ShardSessions:
    """The sessions of a client, by shard. `view` has the pool map, which says the shard of an inode."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self._map: Any = None
        self._shard_of_partition: tuple[int, ...] = ()
        self.by_shard: dict[int, ShardSession] = {}

    def of(self, inode: int) -> ShardSession:
        """The session at the inode's shard; created at its first use."""
        pool_map = self._view.map
        if pool_map is not self._map:
            self._shard_of_partition, self._map = pool_map.shard_of_partition, pool_map
        return self.at(self._shard_of_partition[inode >> _COUNTER_BITS])

    def at(self, shard: int) -> ShardSession:
        """The session at the shard; created at its first use."""
        state = self.by_shard.get(shard)
        if state is None:
            state = self.by_shard[shard] = ShardSession(shard)
        return state
