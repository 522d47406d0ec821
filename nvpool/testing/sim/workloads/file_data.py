"""Workloads on blocks, sizes, appended records and locks, and checks of the replies. Names are in
`sim/workloads/namespace`.

Each kind of work has operations for one client (`acts`: frequency, function), a final look when all is quiet,
and a list of problems. An operation that fails has an unknown outcome. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple

from nvpool.client.pool_client import Client
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, Caller
from nvpool.core.errors import InvariantBroken, LockLost, NoSpace
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, UNLOCKED
from nvpool.meta.state.append_reservations import APPEND_S
from nvpool.testing.sim.linearizability import (
    INITIAL,
    RegisterOperation,
    SizeCall,
    register_problems,
    sizes_problems,
    without_looks_at_unanswered_cuts,
    without_what_was_seen_too_early,
)
from nvpool.testing.sim.pool import CHUNK_BYTES
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

ROOT = 1
BLOCK = 4096
BLOCKS = 3 * CHUNK_BYTES // BLOCK
CALLER = Caller(0, 0, (0,))
ROUND_S = 6.0
"""Time after which a new file is used for sizes and records: their histories are searched, or read as a
whole."""


class SimulatedClient(NamedTuple):
    """A client that works; `handles` are its own, by inode."""

    client: Client
    name: str
    chance: random.Random
    handles: dict[int, object]

    async def handle(self, inode: int, flags: int = os.O_RDWR):
        handle = self.handles.get(inode)
        if handle is None:
            handle = self.handles[inode] = await self.client.vfs.open(inode, flags, CALLER)
        return handle

    async def listed(self, directory: int, step_max: int = 100) -> list[tuple[bytes, int]]:
        """Return names and inodes of a listing in steps of at most `step_max` entries."""
        vfs, cursor, more = self.client.vfs, 0, True
        handle, found = await vfs.opendir(directory), []
        while more:
            listed, more = await vfs.readdir(handle, cursor, self.chance.randint(1, step_max))
            found += zip(listed.names, listed.inodes, strict=True)
            cursor = listed.cursor(-1) if more else 0
        return found


Act = Callable[[SimulatedClient], Awaitable[None]]


class Workload:
    """Base class of a kind of work.

    `losses`: times of power losses. Files are in their own striped directory (`prepare`), so that all shards
    have some.
    """

    directory_name = b""
    """Name of that directory. It determines partitions, so another name changes what a seed does."""

    def __init_subclass__(cls) -> None:
        if "directory_name" not in vars(cls):
            cls.directory_name = cls.__name__.encode()

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        self._loop = loop
        self._done = done
        self._losses = losses
        self._home = ROOT

    async def prepare(self, client: Client) -> None:
        """Make the directory, before faults begin."""
        home = await client.vfs.mkdir(ROOT, self.directory_name, 0o755, CALLER, wide=True)
        self._home = home.inode

    def acts(self) -> list[tuple[int, Act]]:
        return []

    async def look(self, judge: SimulatedClient) -> None:
        """Read the final state, when all is quiet."""

    def problems(self) -> list[str]:
        return []

    async def _make(self, client: Client, name: bytes) -> int:
        attr, handle = await client.vfs.create(self._home, name, 0o644, os.O_RDWR, CALLER)
        await client.vfs.release(handle)
        return attr.inode


class Blocks(Workload):
    """One file of BLOCKS blocks, each a register. It is truncated and grown again, and holes are punched into
    it.

    Bytes that a client has not flushed when another one truncates come after the truncation.
    """

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float], cuts: bool) -> None:
        super().__init__(loop, done, losses)
        self._cuts = cuts
        self._values = 0
        self._blocks: dict[int, list[RegisterOperation]] = {}
        self._inode = 0

    async def prepare(self, client: Client) -> None:
        await super().prepare(client)
        self._inode = await self._make(client, b"blocks")
        await client.vfs.setattr(self._inode, size=BLOCKS * BLOCK, caller=CALLER)

    def acts(self) -> list[tuple[int, Act]]:
        return [
            (8, self._write),
            (10, self.read),
            (1 if self._cuts else 0, self._cut),
            (2 if self._cuts else 0, self._punch),
        ]

    async def _write(self, worker: SimulatedClient) -> None:
        handle = await worker.handle(self._inode)
        self._values += 1
        value, block, begin = self._values, worker.chance.randrange(BLOCKS), self._loop.time()
        history = self._blocks.setdefault(block, [])
        place = len(history)
        history.append(RegisterOperation("write", value, begin, inf, worker.name))
        await worker.client.vfs.write(handle, block * BLOCK, value.to_bytes(8, "little") * (BLOCK // 8))
        if worker.chance.random() < 0.2:
            await asyncio.sleep(worker.chance.uniform(0.0, 1.5))
        try:
            await worker.client.vfs.fsync(handle, True)
        except NoSpace:  # nothing of it was written, nor will be
            history[place] = RegisterOperation("read", INITIAL, -inf, -inf, worker.name)
            return
        history[place] = RegisterOperation("write", value, begin, self._loop.time(), worker.name)
        self._done["writes"] += 1

    async def read(self, worker: SimulatedClient) -> None:
        await self._look_at(worker, worker.chance.randrange(BLOCKS))
        self._done["reads"] += 1

    async def _look_at(self, worker: SimulatedClient, block: int) -> None:
        """Read the block from a store, not from the client's cache."""
        handle = await worker.handle(self._inode, os.O_RDONLY if worker.name == "judge" else os.O_RDWR)
        begin, offset = self._loop.time(), block * BLOCK
        found = bytes(
            await worker.client.vfs.chunks.read(
                handle.file, offset // CHUNK_BYTES, offset % CHUNK_BYTES, BLOCK
            )
        )
        if found != found[:8] * (BLOCK // 8):
            raise InvariantBroken(f"block {block} is a mixture")
        value = int.from_bytes(found[:8], "little")
        self._blocks.setdefault(block, []).append(
            RegisterOperation("read", value, begin, self._loop.time(), worker.name)
        )

    async def _cut(self, worker: SimulatedClient) -> None:
        """Truncate the file and grow it again immediately: the bytes after that point are zeros."""
        first = worker.chance.randrange(BLOCKS)
        cutting = worker.client.vfs.setattr(self._inode, size=first * BLOCK, caller=CALLER)
        await self._zero(worker, range(first, BLOCKS), cutting)
        await worker.client.vfs.setattr(self._inode, size=BLOCKS * BLOCK, caller=CALLER)

    async def _punch(self, worker: SimulatedClient) -> None:
        handle = await worker.handle(self._inode)
        first = worker.chance.randrange(BLOCKS)
        blocks = range(first, min(BLOCKS, first + worker.chance.randint(1, 20)))
        await self._zero(
            worker,
            blocks,
            worker.client.vfs.fallocate(handle, first * BLOCK, len(blocks) * BLOCK, PUNCH_HOLE | KEEP_SIZE),
        )

    async def _zero(self, worker: SimulatedClient, blocks: range, work: Awaitable) -> None:
        begin, places = self._loop.time(), {}
        for block in blocks:
            history = self._blocks.setdefault(block, [])
            places[block] = len(history)
            history.append(RegisterOperation("write", INITIAL, begin, inf, worker.name))
        try:
            await work
        except NoSpace:
            raise InvariantBroken("what frees room was refused for want of it") from None
        for block, place in places.items():
            self._blocks[block][place] = RegisterOperation(
                "write", INITIAL, begin, self._loop.time(), worker.name
            )
        self._done["cuts_made"] += 1

    async def look(self, judge: SimulatedClient) -> None:
        for block in range(BLOCKS):
            await self._look_at(judge, block)

    def problems(self) -> list[str]:
        return [
            f"block {block}: {problem}"
            for block, history in sorted(self._blocks.items())
            for problem in register_problems(
                without_what_was_seen_too_early(
                    history,
                    self._losses,
                    lambda access: access.kind == "write",
                    lambda read, write: read.value == write.value,
                )
            )
        ]


class _Rounds(Workload):
    """In each round all clients work on one file, which the first of them makes."""

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._files: list[tuple[int, float]] = []  # inode, time of creation
        self._names: dict[int, bytes] = {}
        self._tries = 0

    async def _newest(self, worker: SimulatedClient) -> int | None:
        """Return the present file. None: this call has made a new one."""
        if not self._files or self._loop.time() > self._files[-1][1] + ROUND_S:
            self._tries += 1
            name = b"%s-%d" % (self.directory_name, self._tries)
            inode = await self._make(worker.client, name)
            self._names[inode] = name
            self._files.append((inode, self._loop.time()))
            return None
        return self._files[-1][0]

    async def _size(self, worker: SimulatedClient, inode: int) -> int:
        """Return the size that the service has now. A stat of an open file may be answered from memory if the
        service is silent."""
        return (await worker.client.vfs.look(self._home, self._names[inode])).size


class Sizes(_Rounds):
    """A file that is truncated, grown and written at its end; the sizes that clients read must be possible."""

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._calls: dict[int, list[SizeCall]] = {}

    def acts(self) -> list[tuple[int, Act]]:
        return [(2, self._act)]

    async def _act(self, worker: SimulatedClient) -> None:
        inode = await self._newest(worker)
        if inode is None:
            return
        vfs, chance = worker.client.vfs, worker.chance
        kind, size = chance.choice(("cut", "write", "look", "look")), chance.randrange(1, 2 * CHUNK_BYTES)
        calls, begin = self._calls.setdefault(inode, []), self._loop.time()
        place = len(calls)
        if kind == "look":
            size = await self._size(worker, inode)
            calls.append(SizeCall(kind, size, begin, self._loop.time(), worker.name))
        else:
            calls.append(SizeCall(kind, size, begin, inf, worker.name))
            if kind == "cut":
                await vfs.setattr(inode, size=size, caller=CALLER)
            else:
                handle = await worker.handle(inode)
                await vfs.write(handle, size - 1, b"x")
                await vfs.fsync(handle, True)
            calls[place] = SizeCall(kind, size, begin, self._loop.time(), worker.name)
        self._done["sizes"] += 1

    async def look(self, judge: SimulatedClient) -> None:
        for inode, calls in self._calls.items():
            begin = self._loop.time()
            size = await self._size(judge, inode)
            calls.append(SizeCall("look", size, begin, self._loop.time(), "judge"))

    def problems(self) -> list[str]:
        return [
            f"size of {inode:#x}: {problem}"
            for inode, calls in self._calls.items()
            for problem in sizes_problems(
                without_what_was_seen_too_early(
                    without_looks_at_unanswered_cuts(calls), self._losses, lambda call: call.kind != "look"
                )
            )
        ]


class AppendedRecord(NamedTuple):
    content: bytes
    begin: float
    end: float
    who: str


class AppendWorkload(_Rounds):
    """Records that are appended to one file never overlap, and have the order of their replies."""

    directory_name = b"Appends"

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._records: dict[int, list[AppendedRecord]] = {}
        self._contents: dict[int, bytes] = {}
        self._number = 0
        self._zeros: list[str] = []

    def acts(self) -> list[tuple[int, Act]]:
        return [(2, self._append), (1, self._read)]

    async def _read(self, worker: SimulatedClient) -> None:
        """Check that a reader sees whole records.

        Not checked if a client died in an append, or was silent when it was its turn.
        """
        inode = await self._newest(worker)
        if inode is None:
            return
        handle = await worker.client.vfs.open(inode, os.O_RDONLY, CALLER)
        try:
            content = bytes(await worker.client.vfs.read(handle, 0, CHUNK_BYTES))
        finally:
            await worker.client.vfs.release(handle)
        now = self._loop.time()
        if b"\0" in content and all(
            one.end < inf or one.begin > now - APPEND_S for one in self._records.get(inode, ())
        ):
            self._zeros.append(f"{worker.name} read zeros at {content.find(0)} of {inode:#x}, at {now:g} s")

    async def _append(self, worker: SimulatedClient) -> None:
        inode = await self._newest(worker)
        if inode is None:
            return
        self._number += 1
        content = b"<%s %d:" % (worker.name.encode(), self._number)
        content += b"%d " % self._number * worker.chance.choice((1, 50, 1500)) + b">"
        records, begin = self._records.setdefault(inode, []), self._loop.time()
        place = len(records)
        records.append(AppendedRecord(content, begin, inf, worker.name))
        handle = await worker.handle(inode, os.O_RDWR | os.O_APPEND)
        await worker.client.vfs.write(handle, 0, content)
        await worker.client.vfs.fsync(handle, True)
        records[place] = AppendedRecord(content, begin, self._loop.time(), worker.name)
        self._done["appends"] += 1

    async def look(self, judge: SimulatedClient) -> None:
        for inode in self._records:
            handle = await judge.handle(inode, os.O_RDONLY)
            size = await self._size(judge, inode)
            found = bytearray()
            while len(found) < size:
                part = await judge.client.vfs.read(handle, len(found), min(CHUNK_BYTES, size - len(found)))
                if not len(part):
                    break
                found += part
            self._contents[inode] = bytes(found)

    def problems(self) -> list[str]:
        return self._zeros + [
            f"records in {inode:#x}: {problem}"
            for inode, content in self._contents.items()
            for problem in records_problems(content, self._records[inode])
        ]


def records_problems(content: bytes, records: list[AppendedRecord]) -> list[str]:
    """Return why these appends to an empty file cannot have made `content`."""
    places, problems = [], []
    for record in records:
        count = content.count(record.content)
        if count > 1 or (not count and record.end < inf):
            problems.append(f"{record.content[:20]!r} of {record.who} is there {count} times")
        elif count:
            places.append((content.find(record.content), record))
    places.sort(key=lambda one: one[0])
    end = 0
    for before, (place, record) in zip([None, *places], places, strict=False):
        if end < place and all(one.end < inf for one in records):
            problems.append(f"bytes {end} to {place} are nobody's: {content[end:place][:40]!r}")
        if before is not None and record.end < before[1].begin:
            problems.append(
                f"{before[1].content[:20]!r} lies before {record.content[:20]!r}, which was there before it began"
            )
        end = place + len(record.content)
    return problems


class LockWorkload(Workload):
    """The owner of an exclusive lock is alone, and sees what the last owner wrote under it."""

    directory_name = b"Locks"

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._inode = 0
        self._holder = ""
        self._count = 0
        self._possible = {0}
        self._problems: list[str] = []

    async def prepare(self, client: Client) -> None:
        await super().prepare(client)
        self._inode = await self._make(client, b"locked")
        await client.vfs.setattr(self._inode, size=BLOCK, caller=CALLER)

    def acts(self) -> list[tuple[int, Act]]:
        return [(1, self._count_up)]

    async def _count_up(self, worker: SimulatedClient) -> None:
        vfs, handle = worker.client.vfs, await worker.handle(self._inode)
        try:
            await asyncio.wait_for(
                vfs.setlk(handle, 1, 0, 9, EXCLUSIVE, wait=True), worker.chance.choice((0.5, 5.0))
            )
        except TimeoutError:
            return
        if self._holder:
            self._problems.append(f"{worker.name} has the lock, and {self._holder} too")
        self._holder = worker.name
        try:
            await self._under_lock(worker, handle)
        except LockLost:
            worker.handles.pop(self._inode, None)
        finally:
            self._holder = ""
            await vfs.setlk(handle, 1, 0, 9, UNLOCKED)

    async def _under_lock(self, worker: SimulatedClient, handle) -> None:
        vfs = worker.client.vfs
        found = int.from_bytes(bytes(await vfs.read(handle, 0, 8)), "little")
        if found not in self._possible:
            self._problems.append(
                f"{worker.name} finds {found} under the lock, {sorted(self._possible)} would be right"
            )
        self._count += 1
        self._possible |= {self._count}
        await vfs.write(handle, 0, self._count.to_bytes(8, "little"))
        await vfs.fsync(handle, True)
        self._possible = {self._count}
        self._done["locks"] += 1
        await asyncio.sleep(worker.chance.uniform(0.0, 0.3))

    def problems(self) -> list[str]:
        return self._problems
