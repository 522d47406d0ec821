"""Reads of the kernel from drives of this host: the source of chunks whose block locations are known.

The work of a random short-circuit read (client/data/short_circuit) is two dozen small decisions, a preadv and a
writev. Here the decisions are made together, for blocks in one piece on the drive. Data in the page cache is sent
immediately. Other data is read from the drive by io_uring, the reads of a burst submitted together; without io_uring
such reads take the slow path. They bypass the page cache if that contains less than half of the data (the kernel
keeps the mount's own pages). Exception: a small read of a place that was read in the same way a short time before.
All is checked as the short-circuit reads do, after the bytes have come. In every other case (a late read, a change, a
checksum, an error of the drive) the slow path reads again; only that reports errors.

`read_plan` creates the `LocalReads` of a mount, and asks it for reads whose chunk has a location.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from nvpool.blockio import uring_reader
from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages
from nvpool.blockio.uring_reader import AGAIN_S, RING_ENTRIES
from nvpool.client.data.local_drive import LATE, BlockLocations, LocalDrive
from nvpool.client.data.short_circuit import ShortCircuitReads
from nvpool.client.data.store_reads import StoreReads
from nvpool.core import primitives
from nvpool.core.primitives import BlockMemory, ReceivedReply
from nvpool.core.units import BLOCK_BYTES
from nvpool.fuse.fast_path.kernel_reads import LARGE_BYTES, KernelRead, KernelReads

SPARES_MAX = 64
"""Memory of completed reads that is kept for the next ones, for each size."""
BURST_MAX = 64
"""Requests taken, or answered, before other events of the loop are handled."""
REAP_MAX = 4
"""Completed drive reads that are answered before new requests are taken.

If all were answered first, drive and mount would work in turns: 16 readers of 4 KiB, cold, 39,000 reads a
second, and 49,000 to 55,000 by fours; with those of 128 KiB by fours 870 MiB/s, by twos 970.
"""
REAP_BYTES = 192 << 10
"""Bytes after which no further read is answered before new requests are taken."""
DRIVE_WAIT_S = 3.0
"""How long a mount that ends waits for reads that its drive does not complete."""
_SEEN_BITS = 16

_uring: Any = uring_reader.compiled
_RING_ENTRIES, _SPARES_MAX, _BLOCK_BYTES, _LARGE_BYTES = RING_ENTRIES, SPARES_MAX, BLOCK_BYTES, LARGE_BYTES
_BURST_MAX, _REAP_MAX, _REAP_BYTES = BURST_MAX, REAP_MAX, REAP_BYTES
_DIRECT_BYTES, _LATE, _SEEN_SHIFT = DIRECT_READ_BYTES, LATE, 64 - _SEEN_BITS
_FIBONACCI = 0x9E3779B97F4A7C15  # Fibonacci hashing: D. Knuth, The Art of Computer Programming 6.4
_WORD = (1 << 64) - 1


class DriveRead(KernelRead):
    """A READ that waits for the drive.

    It keeps the memory that the kernel writes to, even if the caller is gone by then.
    """

    __slots__ = ("local", "memory", "located", "handle", "place", "is_direct")

    def wait(
        self,
        local: LocalReads,
        memory: BlockMemory,
        located: BlockLocations,
        handle: int,
        place: int,
        is_direct: bool,
    ) -> None:
        """Set where the bytes come from, and the `handle` and `place` in the file for the slow path."""
        self.local, self.memory, self.located = local, memory, located
        self.handle, self.place, self.is_direct = handle, place, is_direct

    def cancel(self) -> bool:
        """As KernelRead.cancel."""
        local: LocalReads = self.local
        local.forget(self)
        return KernelRead.cancel(self)

    def __call__(self, found: None) -> None:
        """Handle a read that takes too long: request the data from its store."""
        if not self.is_done:
            local: LocalReads = self.local
            local.give_up(self, _LATE)


class LocalReads:
    """The reads of one mount from drives of this host."""

    def __init__(self, reads: KernelReads, stores: StoreReads, short_circuit: ShortCircuitReads) -> None:
        self.reads, self._stores = reads, stores
        self.short_circuit: Any = short_circuit
        self._counters = short_circuit.counters
        self._waits: dict[Any, Any] = short_circuit.waiting
        self.inside = 0
        """Reads that the drive has not completed."""
        self._prepared = 0
        self._is_cold = self._is_sent_again = False
        self._small: list[BlockMemory] = []
        self._large: list[BlockMemory] = []
        self._seen = array("I", bytes(4 << _SEEN_BITS))
        self._blocks = ReceivedReply()
        self._loop = asyncio.get_running_loop()
        self._ring: Any = None
        if _uring is not None:
            try:
                self._ring = _uring.Ring(_RING_ENTRIES)
            except OSError:  # no io_uring here
                return
            self._loop.add_reader(self._ring.fileno, self._completed)

    @property
    def is_open(self) -> bool:
        """Whether reads may be in the ring."""
        return self._ring is not None

    # -- from the kernel to the drive

    def begin(
        self,
        located: BlockLocations,
        unique: int,
        pid: int,
        handle: int,
        offset: int,
        size: int,
        within: int,
        skip: int,
        span: int,
    ) -> bool:
        """Answer or start the read of `size` bytes at `offset` of the file, in `span` bytes at `within` of the chunk.

        False: nothing has happened.
        """
        source: LocalDrive = located.source
        first, count = within // _BLOCK_BYTES, span // _BLOCK_BYTES
        if self.inside >= _RING_ENTRIES or source.connection.closed or first + count > located.blocks:
            return False
        place = located.place(first, count)
        if not place:
            return False
        begin = place * _BLOCK_BYTES
        is_cold, is_direct = self._is_cold, False
        # checking by a read would bring it into memory; see blockio/reader
        if is_cold or span >= _DIRECT_BYTES:
            pages = cached_pages(source.fd, begin, span)
            is_cold = 0 <= pages < count
            is_direct = (
                is_cold
                and pages * 2 < count
                and source.takes_direct
                and (span >= _DIRECT_BYTES or not self._was_read(source.target << 48 ^ place))
            )
        memory = self._spare(span)
        if not is_cold:
            if memory.fill(source.fd, begin, span):
                self._is_cold = False
                blocks = self._blocks
                blocks.open_blocks(located.sums, memory, span)
                wrong = located.judge(self._stores.now_s(), blocks, first)
                if wrong:
                    self._give_back(memory)
                    self.short_circuit.note(located, wrong)
                    return False
                located.hit(span, 1)
                self._counters["hits"] += 1
                reads, file = self.reads, located.file
                if file.key is not None:
                    blocks = reads.decrypted(file, located.index, within, span, blocks, 0)
                reads.write(unique, blocks, skip, size)
                self._give_back(memory)
                return True
            self._is_cold = True
        if self._ring is None:
            self._give_back(memory)
            return False
        one: DriveRead = DriveRead.__new__(DriveRead)
        reads, file = self.reads, located.file
        one.begin(file, located.index, within, span, 0.0)
        one.start(reads, unique, skip, size, reads.requests.since_s)
        one.wait(self, memory, located, handle, offset, is_direct)
        self._ring.read_into(source.direct_fd if is_direct else source.fd, memory, span, begin, one)
        self.inside += 1
        self._prepared += 1
        reads.add(one, pid)
        self._waits[one] = self._stores.now_s(), one
        file.grant_used = True
        self._counters["cold"] += 1
        if self.inside == 1:  # the drive is idle
            self.submit()
        return True

    def _was_read(self, key: int) -> bool:
        """Whether a small read of that place is among the latest ones: then it is worth caching. Records this read.

        The table has 65,536 entries; an entry is lost earlier if another read has the same index.
        """
        mixed = key * _FIBONACCI & _WORD
        tag = mixed >> 8 & 0xFFFFFFFF | 1
        at: Any = mixed >> _SEEN_SHIFT
        if self._seen[at] == tag:
            return True
        self._seen[at] = tag
        return False

    def submit(self) -> None:
        """Submit the collected reads to the drive.

        If the kernel has no memory for them now, this is repeated soon. A read that takes too long is requested
        from its store.
        """
        if not self._prepared or self._ring is None:
            return
        try:
            self._prepared = self._ring.send()
        except OSError:
            pass
        if self._prepared and not self._is_sent_again:
            self._is_sent_again = True
            self._loop.call_later(AGAIN_S, self._submit_again)

    def _submit_again(self) -> None:
        self._is_sent_again = False
        self.submit()

    # -- from the drive to the kernel

    def _completed(self) -> None:
        """Answer reads that the drive has completed, and take new requests in between.

        With several readers those are many. A few at a time: so the drive has the next requests of the first
        readers while the last are answered.
        """
        reads = self.reads
        requests: Any = reads.requests
        done = 0
        while done < _BURST_MAX and (count := self.reap()):
            done += count
            reads.path.some_ended()
            if reads.work and requests.reading and not requests.taking:
                reads.path.take_requests()
                done += requests.took

    def reap(self) -> int:
        """Answer some reads that the drive has completed; return how many."""
        if self._ring is None:
            return 0
        count = total = 0
        while count < _REAP_MAX and total < _REAP_BYTES:
            found = self._ring.ended(1)
            if not found:
                break
            done, result = found[0]
            one: DriveRead = done
            self.inside -= 1
            count += 1
            total += one.length
            try:
                self._end(one, result)
            except Exception as error:  # a bug: report it to the caller, and answer the others
                one.report(error)
        return count

    def _end(self, one: DriveRead, result: int) -> None:
        if one.is_done:
            return
        located = one.located
        wrong = -1
        if result == one.length:
            blocks = self._blocks
            blocks.open_blocks(located.sums, one.memory, one.length)
            wrong = located.judge(self._stores.now_s(), blocks, one.offset // _BLOCK_BYTES)
        elif one.is_direct:
            located.source.takes_direct = False  # perhaps the drive only requires larger blocks
        if wrong:
            self.give_up(one, wrong)
            return
        self.forget(one)
        located.hit(one.length, 1)
        self._counters["hits"] += 1
        self.reads.answer(one, blocks, 0)
        self._give_back(one.memory)

    def forget(self, one: DriveRead) -> None:
        """Drop the read from those that the drive must complete in time."""
        self._waits.pop(one, None)

    def give_up(self, one: DriveRead, wrong: int) -> None:
        """Pass the read to the slow path; `wrong`: a reason of short_circuit, or -1 for none."""
        one.is_done = True
        self.forget(one)
        self.short_circuit.note(one.located, wrong)
        self.reads.path.read_otherwise(one.key, one.handle, one.place, one.size)

    # -- memory

    def _spare(self, span: int) -> BlockMemory:
        spares = self._small if span <= _BLOCK_BYTES else self._large
        if spares:
            return spares.pop()
        return BlockMemory(_BLOCK_BYTES if span <= _BLOCK_BYTES else _LARGE_BYTES)

    def _give_back(self, memory: BlockMemory) -> None:
        spares = self._small if memory.size == _BLOCK_BYTES else self._large
        if len(spares) < _SPARES_MAX:
            spares.append(memory)

    async def close(self, is_leaving: Callable[[], bool]) -> None:
        """Wait for the drive's reads, at most DRIVE_WAIT_S or until `is_leaving()`; then close the ring.

        The ring stays open if reads are left: the process is about to end, and the kernel ends the reads with it.
        """
        if self._ring is None:
            return
        self._loop.remove_reader(self._ring.fileno)
        until_s = primitives.stopwatch_s() + DRIVE_WAIT_S
        while self.inside and not is_leaving():
            self.submit()
            while self.reap():  # until then the kernel writes into their memory
                pass
            if (
                primitives.stopwatch_s() >= until_s
            ):  # after the reap: the loop may have stood still, not the drive
                break
            await asyncio.sleep(0.001)
        if not self.inside:
            self._ring.close()
            self._ring = None
