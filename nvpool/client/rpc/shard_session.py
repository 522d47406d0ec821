"""The client's registration at one shard: its slots and what it has open there. Kept by metaclient."""

from __future__ import annotations

import asyncio
from collections import deque

from nvpool.client.state.leases import ShardWatch


class ShardSession:
    def __init__(self, shard: int):
        self.shard = shard
        self.session = 0
        self.secret = b""
        self.lease_s = 60.0
        self.incarnation = 0
        self.met: object = None                          # the connection over which that was told
        self.meeting: asyncio.Task | None = None
        self.slots: deque[tuple[int, int]] = deque()     # free ones, with the last sequence that each has used
        self.waiting: deque[asyncio.Future] = deque()    # for a slot
        self.generation = 0                              # of the session: slots of an earlier one are not given back
        self.open: dict[int, int] = {}                   # inode -> registrations
        self.unnamed = False                             # the shard does not know all of `open`: a new session, a restart
        self.released: list[int] = []
        self.leaving: list[list[int]] = []               # batches of those that are under way
        self.held = b""                                  # what the shard has said last that is open here
        self.doubts: dict[int, tuple[int, frozenset[int]]] = {}  # not open, and held by the shard: handles, slots in use then
        self.opening: asyncio.Task | None = None
        self.renewal: asyncio.Task | None = None
        self.releasing: asyncio.Task | None = None
        self.watch = ShardWatch()
        self.watching: asyncio.Task | None = None
        self.untold: dict[int, int] = {}                 # of `open`: what the shard has not been told of
        self.telling: asyncio.Task | None = None
        self.tell_now = asyncio.Event()
        self.record = -1                                 # of the memory that outlives this process
        self.earlier: tuple[int, bytes] | None = None    # the session and secret of the process before us, to be taken up
        self.arrived: dict[int, int] = {}                # of `open`: what came from another shard, and is to be named here
        self.naming: asyncio.Task | None = None
        self.slot_count = 0
        self.taken_up = -1                               # the generation in which it was
        self.early: dict[int, int] = {}                  # slot -> sequence, of requests that may come again
        self.given_up: list[int] = []                    # slots that were of those, and the shard is to be told

    @property
    def in_use(self) -> bool:
        """Whether a change is under way."""
        return bool(self.session) and len(self.slots) + len(self.early) < self.slot_count

    def wake(self) -> None:
        """The first who waits for a slot may look again."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        while self.waiting:
            self.wake()
