"""Location leases: which blocks clients of this host may read directly, and until when.

A client may read a leased location until the lease ends (short-circuit reads). So the store does not allocate
a block again, and does not punch it out of its file, before every lease that may name the block has ended.
Blocks that a change frees of an inode with leases are held that long (`until`; the allocator keeps the time,
also in the index). Lease times are on CLOCK_BOOTTIME: the store counts from its answer, the client from the
sending of its request, which is earlier.

A lease protects blocks. The table prevents readers from returning old bytes: 65,536 counters in memory shared
with clients, which can only read the table. Before a change of a chunk is applied, the chunk's counter is
raised. A client checks the counter after it has read, and discards the bytes if the counter differs from the
one that came with the location. So after a write, a truncation or a removal was acknowledged, no read that
begins later returns the old bytes, exactly as if the client had asked the store. Behind the counters, the
table stores the end of this target's serving lease (`serve_until`; store/server/serving_lease), since other
targets may have replaced this target.

The table can outlive a process if the supervisor keeps its memory (`KeptTable`). The next process raises all
counters before it serves, so that no client returns bytes that it reads at locations from the dead process.
Without a kept table, the counters of the dead process never change, and truncations are not acknowledged
until its leases have ended. A process that ends in order raises all counters last (`end`) and records this.
In each of these cases every inode counts as leased until the leases of the previous process have ended. The
existence of leases is recorded, once for each process, before the first lease is issued:

    L                   boot id (36 bytes, of Linux) · lease lifetime in milliseconds u32 (little-endian)
    E                   boot id: no client returns what it reads at any location leased until now
    h number u64 (BE)   until, milliseconds on CLOCK_BOOTTIME u64 · runs: u64 each, disk block above 16 bits
                        of (blocks - 1)

A reboot ends all clients of the host together with their leases. The user is the block store, on its event
loop.
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
from nvpool.host.process_identity import boot_id
from nvpool.kv.api import Kv
from nvpool.rpc.messages.read_write_codec import HANDOVER

SLOT_BITS = 16
TABLE_BYTES = (4 << SLOT_BITS) + 8
"""Size of the table: the counters, then a double with seconds on the store's CLOCK_BOOTTIME."""
INODES_MAX = 200_000
"""Inodes remembered as leased.

Beyond this number every inode counts as leased, until the set is forgotten.
"""
LEASES_KEY = b"L"
ENDED_KEY = b"E"
TOKEN_BYTES = 16
_LIFE = struct.Struct("<I")
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SEAL, _F_SEAL_SIZE = 0x1, 0x2 | 0x4
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: nobody can map the memory for writing any more.

Before that only the descriptor's mode prevents this.
"""


_INODE_FACTOR, _INDEX_FACTOR, _U64_MASK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFFFFFFFFFFFFFFFF
_SLOT_SHIFT, _STAMP_MASK = 64 - SLOT_BITS, 0xFFFFFFFF


def slot_of(inode: int, index: int) -> int:
    """Return the counter of a chunk. Several chunks may share a counter."""
    return (inode * _INODE_FACTOR + index * _INDEX_FACTOR & _U64_MASK) >> _SLOT_SHIFT


def encode_said(target: int, token: bytes, now_s: float) -> bytes:
    """Encode the message that accompanies the descriptors of a target, at `now_s` on CLOCK_BOOTTIME."""
    return HANDOVER.pack(target, 1 << SLOT_BITS, token, now_s)


class KeptTable(NamedTuple):
    """A lease table in a memfd, used by this target's processes since `since_s`.

    An empty memfd has not been used yet.
    """

    descriptor: int
    since_s: float


class LocationLeases:
    """Issuer of location leases. `life_s` 0: no leases are issued, and all calls cost nothing."""

    def __init__(self, kv: Kv, clock: Clock, life_s: float, kept: KeptTable | None = None) -> None:
        """Read the records of the previous process and create the table.

        On return this object owns the descriptor of `kept`. CorruptRecord: a record is malformed.
        """
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
        """End of the leases that a previous process issued."""
        self.unseen_until_s = now_s
        """End of those of these leases whose table is not ours."""
        raw = kv.get(LEASES_KEY)
        if raw is not None:
            if len(raw) < _LIFE.size:
                raise CorruptRecord("the index record of lifetimes is too short")
            if raw[: -_LIFE.size] == boot_id().encode():
                dead_life_s = _LIFE.unpack(raw[-_LIFE.size :])[0] / 1000
                self.dead_until_s = self.unseen_until_s = now_s + dead_life_s
                if kept is not None and life_s:
                    self.unseen_until_s = min(self.dead_until_s, kept.since_s + dead_life_s)
                if kv.get(ENDED_KEY) == boot_id().encode():
                    self.unseen_until_s = now_s
        self._fd = kept.descriptor if kept is not None else -1
        self._memory: mmap.mmap | None = None
        self.stamps = memoryview(b"")
        """Change count of each slot, in the memory shared with clients."""
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
            # With this seal, no mapping ever extends past the end of the memory.
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SIZE)
            if not kept:  # else the next process must be able to write; only we hold the memfd
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
                fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SEAL)
        except OSError:  # the system lacks this: no leases are issued
            self.life_s = 0.0
            self.unseen_until_s = self.dead_until_s
            self.close()
            return
        self.stamps = memoryview(self._memory)[: 4 << SLOT_BITS].cast("I")
        self._serving = memoryview(self._memory)[4 << SLOT_BITS :].cast("d")
        if kept:
            self.changing_all()  # before clients may trust the time behind the counters
        self._serving[0] = math.inf

    def end(self) -> None:
        """End all leases in order: from now on no client returns bytes that it reads at its locations.

        The next open of the store knows this from a record. Does nothing while leases from a process with
        another table are valid.
        """
        if not self.life_s or self._clock.boottime_s() < self.unseen_until_s or self._kv.full:
            return
        self.changing_all()
        self._recorded = False
        self._kv.apply([(ENDED_KEY, boot_id().encode())])

    def close(self) -> None:
        self.life_s = 0.0
        self.stamps.release()
        self.stamps = memoryview(b"")
        self._serving.release()
        self._serving = memoryview(b"")
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def table(self) -> int:
        """Return a read-only descriptor of the table for another process. The caller closes it.

        NotSupported, DriveFailed: no descriptor.
        """
        if not self.life_s:
            raise NotSupported("this store issues no location leases")
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, "opening the table of changes for a reader") from None

    # -- issuing ---------------------------------------------------------------------------------------------------------

    def issue(self, inode: int, life_s: float) -> float:
        """Record that locations of the inode are leased now, for at most `life_s`; return the lifetime."""
        life_s = min(life_s, self.life_s)
        if life_s <= 0.0:
            return 0.0
        if not self._recorded:
            if self._kv.full:
                return 0.0
            record = boot_id().encode() + _LIFE.pack(math.ceil(self.life_s * 1000))
            if self._kv.get(LEASES_KEY) != record or self._kv.get(ENDED_KEY) is not None:
                self._kv.apply([(LEASES_KEY, record), (ENDED_KEY, None)])
            self._recorded = True
        now_s = self._turn()
        if len(self._young) >= INODES_MAX:
            self._all_until_s = now_s + self.life_s
        else:
            self._young.add(inode)
        self.given += 1
        return life_s

    def stamp(self, inode: int, index: int) -> tuple[int, int]:
        """Return (slot, current value of its counter)."""
        slot = slot_of(inode, index)
        return slot, self.stamps[slot]

    def _turn(self) -> float:
        """Forget inodes whose leases have ended; return the time.

        Each inode stays in a set for at least one lease lifetime.
        """
        now_s = self._clock.boottime_s()
        if now_s > self._turn_s + self.life_s:
            self._old = self._young if now_s <= self._turn_s + 2 * self.life_s else set()
            self._young = set()
            self._turn_s = now_s
        return now_s

    # -- serving lease ---------------------------------------------------------------------------------------------------

    def serve_until(self, until_s: float) -> None:
        """Make clients discard bytes that they read at our locations at `until_s` or later.

        `inf`: the target is the only member of its chains.
        """
        if self.life_s:
            self._serving[0] = until_s

    def changing_all(self) -> None:
        """Invalidate all leases, since some chains may no longer be read here.

        From now on no client returns bytes that it reads at any of its locations.
        """
        if self.life_s:
            table = self.stamps
            table[:] = memoryview(array("I", [count + 1 & 0xFFFFFFFF for count in table]))

    # -- changes ---------------------------------------------------------------------------------------------------------

    def changing(self, inode: int, indexes: Iterable[int]) -> None:
        """Invalidate leases of these chunks, which are about to change.

        From now on no client returns bytes that it reads at its locations of these chunks. Call this before
        the change is applied. If the change then fails, the clients only have to ask again.
        """
        if self.life_s:
            for index in indexes:
                self.changing_chunk(inode, index)

    def changing_chunk(self, inode: int, index: int) -> None:
        """As `changing`, for one chunk."""
        if self.life_s:
            slot = slot_of(inode, index)
            stamp = self.stamps[slot]
            self.stamps[slot] = stamp + 1 & _STAMP_MASK

    def until(self, inode: int) -> float:
        """Return until when clients may read blocks leased so far for the inode.

        Inode 0 means any inode. Returns 0 if there are no such leases.
        """
        if self.life_s:
            now_s = self._turn()
            any_leased = not inode and (self._young or self._old)
            if any_leased or inode in self._young or inode in self._old or now_s <= self._all_until_s:
                return max(now_s + self.life_s, self.dead_until_s)
            return self.dead_until_s if now_s < self.dead_until_s else 0.0
        return self.dead_until_s if self._clock.boottime_s() < self.dead_until_s else 0.0

    async def clients_of_the_dead(self) -> None:
        """Wait for the end of leases whose holders cannot see our table.

        Such a client may still read bytes that were truncated or punched out.
        """
        while (left_s := self.unseen_until_s - self._clock.boottime_s()) > 0:  # noqa: ASYNC110 - a clock, no event
            await asyncio.sleep(min(left_s, 0.05))
