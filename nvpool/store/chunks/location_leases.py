"""What a store has told clients of its host about where blocks lie, and until when they may read there.

A location that was given out may be read until its lifetime has ended. So a block is not given to another write, and not
punched out of its file, before every lifetime has ended that may name it: what a change frees of an inode with lent
locations rests that long (`until`, kept by the allocator, in the index too). Lifetimes count on CLOCK_BOOTTIME: in the store
from the answer, in the client from the sending of its request, which is earlier.

A lifetime protects blocks; that readers do not see old bytes is what the table is for: 65,536 counters in memory that is
shared with clients, who can only read it. Before a change of a chunk is applied, its counter is raised; a client looks at it
after it has read, and throws away what it read when the counter is not what came with the location. So after a write, a cut
or a removal was answered, no read that begins later returns what was there before, as if it had asked the store. Behind the
counters stands until when this target may serve at all (`serve_until`; store/server/serving_lease): others may have taken its
place since.

The memory of the table outlives a process where its supervisor keeps it (`KeptTable`): its successor raises all counters
before it serves, so that no client returns what it reads at locations of the dead. Without that counters of the dead process
stand still, and until the lifetimes that it gave out have ended cuts are not answered. One that ends in order raises all of
them last (`end`), and says so. In each case every inode counts as lent for so long. That there were any is recorded, once for
a process, before the first location is given out:

    L                   boot id (36 bytes, of Linux) · lifetime in milliseconds u32 (little-endian)
    E                   boot id: no client returns what it reads at any location that was given out until now
    h number u64 (BE)   until, milliseconds on CLOCK_BOOTTIME u64 · runs: u64 each, disk block above 16 bits of (blocks - 1)

A reboot ends all clients of the host with their lifetimes. Called by the block store on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import mmap
import os
import struct
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, NotSupported, from_os_error
from nvpool.host.processes import boot_id
from nvpool.kv.api import Kv
from nvpool.rpc.messages.data_codec import LENT
from nvpool.store.chunks.api import Located
from nvpool.store.chunks.index import Chunk, Index
from nvpool.store.chunks.read_batch import extend_runs
from nvpool.store.disk.index_records import SEGMENT_BITS, SEGMENT_BLOCKS

SLOT_BITS = 16
TABLE_BYTES = (4 << SLOT_BITS) + 8
"""Counters, then a double: seconds on the store's CLOCK_BOOTTIME."""
INODES_MAX = 200_000
"""Remembered as lent; beyond it every inode counts as lent, until the set is forgotten."""
LENT_KEY = b"L"
ENDED_KEY = b"E"
TOKEN_BYTES = 16
_LIFE = struct.Struct("<I")
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SEAL, _F_SEAL_SIZE = 0x1, 0x2 | 0x4
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: nobody maps it for writing any more. Before that only the descriptor's mode says so."""


def slot_of(inode: int, index: int) -> int:
    """The counter of a chunk; of several, as it comes."""
    return (inode * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F & 0xFFFFFFFFFFFFFFFF) >> 64 - SLOT_BITS


def encode_said(target: int, token: bytes, now_s: float) -> bytes:
    """What is said with the descriptors of a target, at `now_s` on CLOCK_BOOTTIME."""
    return LENT.pack(target, 1 << SLOT_BITS, token, now_s)


class KeptTable(NamedTuple):
    """A memfd of ours that whoever serves this target has used for its table since `since_s`; empty: nobody yet."""

    descriptor: int
    since_s: float


class Lender:
    """`life_s` 0: nothing is lent, and everything here costs nothing."""

    def __init__(self, kv: Kv, clock: Clock, life_s: float, kept: KeptTable | None = None) -> None:
        """Reads what a process before us recorded. The descriptor of `kept` is ours from now on. CorruptRecord."""
        self._kv = kv
        self._clock = clock
        self.life_s = life_s
        self.token = clock.secret(TOKEN_BYTES)
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._turn_s = -math.inf
        self._all_until_s = -math.inf
        self._recorded = False
        self.given = 0
        now_s = clock.boottime_s()
        self.dead_until_s = now_s
        """Until then lifetimes run that a process before us gave out."""
        self.unseen_until_s = now_s
        """Until then some of them run with a table that is not ours."""
        raw = kv.get(LENT_KEY)
        if raw is not None:
            if len(raw) < _LIFE.size:
                raise CorruptRecord("the index record of lifetimes is too short")
            if raw[:-_LIFE.size] == boot_id().encode():
                dead_life_s = _LIFE.unpack(raw[-_LIFE.size:])[0] / 1000
                self.dead_until_s = self.unseen_until_s = now_s + dead_life_s
                if kept is not None and life_s:
                    self.unseen_until_s = min(self.dead_until_s, kept.since_s + dead_life_s)
                if kv.get(ENDED_KEY) == boot_id().encode():
                    self.unseen_until_s = now_s
        self._fd = kept.descriptor if kept is not None else -1
        self._memory: mmap.mmap | None = None
        self._table = memoryview(b"")
        self._serving = memoryview(b"")
        if life_s:
            self._make_table()
        else:
            self.close()

    def _make_table(self) -> None:
        kept = self._fd >= 0
        try:
            if not kept:
                self._fd = os.memfd_create("nvpool-changes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            if os.fstat(self._fd).st_size != TABLE_BYTES:
                os.ftruncate(self._fd, TABLE_BYTES)
            self._memory = mmap.mmap(self._fd, TABLE_BYTES)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SIZE)  # a mapping of it never meets its end
            if not kept:  # else our successor has to write there; that it is ours keeps others from it
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
                fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SEAL)
        except OSError:  # a system without: nothing is lent there
            self.life_s = 0.0
            self.unseen_until_s = self.dead_until_s
            self.close()
            return
        self._table = memoryview(self._memory)[:4 << SLOT_BITS].cast("I")
        self._serving = memoryview(self._memory)[4 << SLOT_BITS:].cast("d")
        if kept:
            self.changing_all()  # before its clients may believe anything that stands behind the counters
        self._serving[0] = math.inf

    def end(self) -> None:
        """Nothing is changed or served any more: no client returns what it reads from now on at locations that it has, and
        whoever opens the store next knows that. Not where some have theirs from a process whose table is not ours."""
        if not self.life_s or self._clock.boottime_s() < self.unseen_until_s or self._kv.full:
            return
        self.changing_all()
        self._recorded = False
        self._kv.apply([(ENDED_KEY, boot_id().encode())])

    def close(self) -> None:
        self.life_s = 0.0
        self._table.release()
        self._table = memoryview(b"")
        self._serving.release()
        self._serving = memoryview(b"")
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def table(self) -> int:
        """A descriptor of the table for another process, for reading. The caller closes it. NotSupported, DriveFailed."""
        if not self.life_s:
            raise NotSupported("nothing is lent here")
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, "opening the table of changes for a reader") from None

    # -- giving out ------------------------------------------------------------------------------------------------------

    def lend(self, inode: int, life_s: float) -> float:
        """Note that locations of the inode are given out now, for at most `life_s`; for how long they are."""
        life_s = min(life_s, self.life_s)
        if life_s <= 0.0:
            return 0.0
        if not self._recorded:
            if self._kv.full:
                return 0.0
            record = boot_id().encode() + _LIFE.pack(math.ceil(self.life_s * 1000))
            if self._kv.get(LENT_KEY) != record or self._kv.get(ENDED_KEY) is not None:
                self._kv.apply([(LENT_KEY, record), (ENDED_KEY, None)])
            self._recorded = True
        now_s = self._turn()
        if len(self._young) >= INODES_MAX:
            self._all_until_s = now_s + self.life_s
        else:
            self._young.add(inode)
        self.given += 1
        return life_s

    def stamp(self, inode: int, index: int) -> tuple[int, int]:
        """(slot, what it holds)."""
        slot = slot_of(inode, index)
        return slot, self._table[slot]

    def _turn(self) -> float:
        """Forget inodes whose lifetimes have ended: each is in a set for one lifetime at least. The time."""
        now_s = self._clock.boottime_s()
        if now_s > self._turn_s + self.life_s:
            self._old = self._young if now_s <= self._turn_s + 2 * self.life_s else set()
            self._young = set()
            self._turn_s = now_s
        return now_s

    # -- who serves ------------------------------------------------------------------------------------------------------

    def serve_until(self, until_s: float) -> None:
        """From now on no client returns what it reads at our locations at `until_s` and later. `inf`: we serve alone."""
        if self.life_s:
            self._serving[0] = until_s

    def changing_all(self) -> None:
        """Chains are not ours to be read from any more: no client returns what it reads at any location that it has."""
        if self.life_s:
            table = self._table
            table[:] = memoryview(array("I", [count + 1 & 0xFFFFFFFF for count in table]))

    # -- changes ---------------------------------------------------------------------------------------------------------

    def changing(self, inode: int, indexes: Iterable[int]) -> None:
        """These chunks are about to change: from now on no client returns what it reads at locations that it has of them.
        Called before the change is applied; if it then fails, they have only to ask again."""
        if self.life_s:
            table = self._table
            for index in indexes:
                slot = slot_of(inode, index)
                table[slot] = table[slot] + 1 & 0xFFFFFFFF

    def until(self, inode: int) -> float:
        """Until when blocks may be read that were named for the inode (0: for any) before now; 0 when there are none."""
        if self.life_s:
            now_s = self._turn()
            any_lent = not inode and (self._young or self._old)
            if any_lent or inode in self._young or inode in self._old or now_s <= self._all_until_s:
                return max(now_s + self.life_s, self.dead_until_s)
            return self.dead_until_s if now_s < self.dead_until_s else 0.0
        return self.dead_until_s if self._clock.boottime_s() < self.dead_until_s else 0.0

    async def clients_of_the_dead(self) -> None:
        """Who does not see our table may read what was cut or punched until his lifetimes have ended."""
        while (left_s := self.unseen_until_s - self._clock.boottime_s()) > 0:  # noqa: ASYNC110 - a clock, no event
            await asyncio.sleep(min(left_s, 0.05))


def located(index: Index, chunk: Chunk, blocks: int) -> Located:
    """Where the first `blocks` blocks of a chunk lie; holes behind the last that is there may be left out."""
    runs: list[list[int]] = []
    sums: list[bytes] = []
    at = 0
    for number in range((blocks + SEGMENT_BLOCKS - 1) >> SEGMENT_BITS):
        segment = index.segment(chunk, number)
        start = number << SEGMENT_BITS
        have = min(len(segment.disk), blocks - start)
        if not have:
            continue
        if at < start:
            extend_runs(runs, 0, start - at)
            sums.append(bytes(4 * (start - at)))
        if segment.base:
            extend_runs(runs, segment.base, have)
        else:
            for place in segment.disk[:have]:
                extend_runs(runs, place, 1)
        sums.append(segment.crcs[:4 * have])
        at = start + have
    return Located(chunk.version, at, array("Q", [place << 12 | count - 1 for place, count in runs]), b"".join(sums))
