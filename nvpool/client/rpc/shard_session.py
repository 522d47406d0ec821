"""The client's session at one shard: its request slots and its open files. Owned by the metadata client."""

from __future__ import annotations

import asyncio
from collections import deque

from nvpool.client.state.leases import ShardWatch


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
