"""Short-circuit reads: read drives of this host without a data request to their daemon.

A store that allows this hands over a read-only descriptor of its data file or device, and of its change
table. The store also answers where the blocks of chunks are, with their checksums and a lifetime (the
location lease; store/chunks/location_leases says what it protects). A read is then one preadv; bytes in the
page cache are available immediately, without a task and without an await.

The guarantees are those of a read through the store. The result of a read is dropped, and the store is asked
by the slow path, which handles damage, in each of these cases: the lifetime had ended by then (counted from
the sending of the request, on CLOCK_BOOTTIME); the chunk has changed (its counter in the table is different);
the target's serving lease has ended (its end is in the table); the connection to the store is closed; a
checksum does not match. Blocks that did not exist when the location was fetched are never made up: they are
read through the store. Memory is bounded. Nothing here waits, and nothing raises: without a location the
result is None.

Used by the reader, `read/batch` and the chunk client on one event loop; by `read/caller_thread_reads` from any
thread (`look`, `hit`, `may_serve`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.reader import DIRECT_READ_BYTES, reader_for
from nvpool.client.data.local_drive import LATE, WRONG, BlockLocations, LocalDrive
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.core.checksum import block_checksums
from nvpool.core.clock import Clock
from nvpool.core.containers.buffer_pool import SPARES
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import (
    AccessDenied,
    CorruptFrame,
    InvalidRequest,
    NotSupported,
    NvpoolError,
    Stale,
    Unavailable,
)
from nvpool.core.primitives import ReceivedReply
from nvpool.core.units import BLOCK_BYTES, KIB
from nvpool.host.process_identity import host_id
from nvpool.rpc.fd_passing import path_beside, take
from nvpool.rpc.messages.read_write_codec import (
    LOCATE_ENTRIES_MAX,
    LOCATE_ENTRY,
    LOCATE_RESULT,
    PAST_ENTRIES_MAX,
    PAST_READS,
    SAME_VERSION,
    decoded,
)
from nvpool.rpc.v1 import data_pb2, wire_pb2

log = logging.getLogger(__name__)

NOW_BYTES_MAX = 1024 * KIB
"""Largest read from the page cache in one step: some 200 µs. Callers split longer reads."""
AGAIN_S, AGAIN_REFUSED_S = 1.0, 30.0
"""Delay before a target is asked for descriptors again, if unreachable and if it refused."""
DISTRUST_S = 10.0
"""How long a chunk is read through its store after a checksum mismatch."""
RENEW_S = 2.0
"""Time before its end when a used location is renewed, and an unused one dropped."""
LEFT_MAX = 4
"""Descriptors of dead store processes that are kept for reads in flight."""
COLD = 8
"""Page-cache misses in a row after which reads go to the drive without a look.

Only one read in PROBE still tries the page cache. The others are submitted together with all reads of this
event-loop iteration, so the drive is notified once. (16 readers of 4 KiB, cold: 12 k reads/s became 18 to 24
k.)
"""
PROBE = 16
SLOW_S = 3.0
"""Time for a read of the drive. After this the store is asked, whose reply has a deadline."""
AHEAD = 16
"""Chunks ahead of a sequential reader that should be located. If one is not, GROUP chunks are located.

A reply with locations comes behind the data that the store reads for the same reader. Requested one by one,
locations always arrived when their bytes had just been requested from the store.
"""
CREDIT = 1024
"""Chunks of a file that are located before any location must have been used. Then each hit earns one more.

A file of 1 GiB is located completely by its first dozen misses: some 20 ms of its store, 1.5 MiB of memory
here.
"""
GROUP = 64
"""Neighbours that are located with a chunk within the credit. Random reads reach them too."""
SELDOM = 16
"""Without credit, one miss in this many locates its own chunk."""
ABSENT, COLD_BLOCKS = 1, 2
"""Reasons of a failed look, beside LATE and WRONG: not located, not in the page cache."""
_ENTRY_BYTES = 400
_NOWAIT = os.RWF_NOWAIT


class ShortCircuitReads:
    """The short-circuit reads of a client: locations, and the targets whose drives it may read."""

    def __init__(
        self, dialer, options: ClientOptions, clock: Clock, *, epoch: Callable[[], int], find_lane: Callable
    ):
        self._dialer = dialer
        self._find_lane = find_lane
        self.clock = clock
        self.now_s = clock.boottime_s
        self._epoch = epoch
        self.bytes_max = options.locations_bytes
        self.byte_count = 0
        self._loop = asyncio.get_running_loop()
        self.on = options.short_circuit and options.locations_bytes > 0
        self._direct_reads = options.direct_reads
        self.sources: dict[int, LocalDrive] = {}
        self._left: list[LocalDrive] = []
        self._not_before: dict[int, float] = {}
        self._introducing: dict[int, asyncio.Task] = {}
        self._wanted: dict = {}  # lane -> {(inode, index): (file, version that is here)}
        self._asked: set[tuple[int, int]] = set()
        self._distrusted: dict[tuple[int, int], float] = {}
        self._order: deque[tuple[float, BlockLocations]] = deque()
        self._reader: WaitingReader | None = None
        self._number = 0
        self.cold_reads = 0  # misses of the page cache in a row
        self.waiting: dict[object, tuple[float, Callable[[memoryview | None], None]]] = {}
        """Reads that wait for the drive, the oldest first: start time and callback.

        The callback gets None when the read has taken too long, so that the store must be asked.
        """
        self.counters = {"hits": 0, "cold": 0, "located": 0, "late": 0, "mismatches": 0}

    # -- reading -----------------------------------------------------------------------------------------------------------

    def read_now(self, located: BlockLocations, offset: int, length: int) -> memoryview | None:
        """Read the whole blocks [offset, offset + length) from the page cache, or return None.

        The caller owns the result.
        """
        if self.cold_reads >= COLD and self.waiting:
            self.cold_reads += 1
            if self.cold_reads % PROBE:
                return None
        found = self.look(located, offset, length)
        if type(found) is memoryview:
            self.cold_reads = 0
            self.hit(located, length)
            return found
        if found == COLD_BLOCKS:
            self.cold_reads += 1
        else:
            self.note(located, found)
        return None

    def look(self, located: BlockLocations, offset: int, length: int) -> memoryview | int:
        """As `read_now`, but return the reason of a failure, without acting upon it.

        Any thread may call this.
        """
        source = located.source
        first = offset >> 12
        if source.connection.closed:
            return LATE
        if offset + length > located.blocks << 12:
            return ABSENT
        if length == BLOCK_BYTES:
            place = located.base + first if located.base else located.places[first]
            if not place:
                return ABSENT
            into = memoryview(bytearray(BLOCK_BYTES))
            try:
                if os.preadv(source.fd, (into,), place << 12, _NOWAIT) != BLOCK_BYTES:
                    return ABSENT
            except OSError:  # not in the page cache; any other error shows again in a read through the store
                return COLD_BLOCKS
        else:
            runs = self.runs(located, first, length >> 12)
            if runs is None or source.reads_direct(runs, length):
                return ABSENT
            into = _memory(length)
            at = 0
            try:
                for place, count in runs:
                    if os.preadv(source.fd, (into[at : at + count],), place, _NOWAIT) != count:
                        return ABSENT
                    at += count
            except OSError:
                return COLD_BLOCKS
        wrong = self._judge(located, first, into)
        if not wrong:
            self._decrypt(located, first, into)
        return wrong or into

    @staticmethod
    def _decrypt(located: BlockLocations, first: int, into: memoryview) -> None:
        """Decrypt in place the bytes of an encrypted volume."""
        file = located.file
        if file.key is not None:
            file.key.cipher.decrypt(file.inode, located.index, first, into, into)

    def good(self, located: BlockLocations, first: int, into: memoryview) -> bool:
        """Whether the bytes just read are the present stored content of the blocks from `first` on. If they
        are, `into` is decrypted."""
        wrong = self._judge(located, first, into)
        if wrong:
            self.note(located, wrong)
            return False
        self.hit(located, len(into))
        self._decrypt(located, first, into)
        return True

    def wrong_reads(self, reads: Sequence[tuple[BlockLocations, int, tuple]], into: memoryview) -> set[int]:
        """The indices of the reads whose bytes are not the present stored content; all others are counted.

        Each read is (location, first block, (file, offset, length, place in `into`)); it was read just now,
        in whole blocks. Nothing is decrypted. A location with wrong reads is dropped, and counted and logged
        once.
        """
        spans: list[list[int]] = []
        end = -1
        for _, _, (_, _, length, place) in reads:
            if place != end:
                spans.append([place, place])
            spans[-1][1] = end = place + length
        sums = b"".join([block_checksums(into[begin:end]) for begin, end in spans])
        states: dict[BlockLocations, list[int]] = {}  # fault of the location, good reads, their bytes
        wrong: set[int] = set()
        at = 0
        for number, (located, first, (_, _, length, _)) in enumerate(reads):
            state = states.get(located)
            if state is None:
                state = states[located] = [LATE if located.is_late(self.now_s()) else 0, 0, 0]
            begin, at = at, at + (length >> 10)  # 4 bytes for each block of 4 KiB
            first <<= 2
            if state[0] == LATE:
                wrong.add(number)
            elif sums[begin:at] != located.sums[first : first + at - begin]:
                wrong.add(number)
                state[0] = WRONG
            else:
                state[1] += 1
                state[2] += length
        for located, (fault, count, byte_count) in states.items():
            if count:
                self.hit(located, byte_count, count)
            if fault:  # after the hits: this drops the location and reports its reads
                self.note(located, fault)
        return wrong

    def _judge(self, located: BlockLocations, first: int, into: memoryview) -> int:
        """The fault of the bytes just read, 0 for none."""
        blocks = ReceivedReply()
        blocks.open(located.sums, into)
        try:
            return located.judge(self.now_s(), blocks, first)
        finally:
            blocks.close()

    def note(self, located: BlockLocations, wrong: int) -> None:
        """Act upon the result of a look or of a check."""
        if wrong == LATE:
            self._late(located)
        elif wrong == WRONG:
            self._mismatch(located)

    def hit(self, located: BlockLocations, byte_count: int, count: int = 1) -> None:
        """Count successful looks with that many bytes. Any thread may call this."""
        located.hit(byte_count, count)
        self.counters["hits"] += count

    @staticmethod
    def runs(located: BlockLocations, first: int, count: int) -> list[tuple[int, int]] | None:
        """The blocks as (place, bytes) in order; None if one of them is a hole."""
        if located.base:
            return [(located.base + first << 12, count << 12)]
        runs: list[tuple[int, int]] = []
        begin = end = 0
        for place in located.places[first : first + count]:
            if not place:
                return None
            if place != end:
                if begin:
                    runs.append((begin << 12, end - begin << 12))
                begin = place
            end = place + 1
        runs.append((begin << 12, end - begin << 12))
        return runs

    def _late(self, located: BlockLocations) -> None:
        self.counters["late"] += 1
        self._drop(located)

    def _mismatch(self, located: BlockLocations) -> None:
        self.counters["mismatches"] += 1
        file = located.file
        log.warning(
            "a block of chunk %d of inode %d, read from target %d's drive, does not have its checksum; its store is "
            "asked",
            located.index,
            file.inode,
            located.source.target,
        )
        if len(self._distrusted) > 1000:
            self._distrusted.clear()
        self._distrusted[file.inode, located.index] = self.now_s() + DISTRUST_S
        self._drop(located)

    def try_read(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        lane,
        on_done: Callable[[memoryview | None], None],
        *,
        missed: bool = False,
    ) -> bool:
        """Read from the drive if the chunk is located. Return whether the read was done or submitted.

        `on_done` as in `begin`; it may be called before this returns. `missed`: the caller has just tried
        `read_now`.
        """
        located = file.located.get(index)
        if located is not None:
            if length <= NOW_BYTES_MAX and not missed:
                found = self.read_now(located, offset, length)
                if found is not None:
                    on_done(found)
                    return True
            if file.located.get(index) is located:
                return self.begin(located, offset, length, on_done)
        self.want(file, index, lane)
        return False

    def begin(
        self, located: BlockLocations, offset: int, length: int, on_done: Callable[[memoryview | None], None]
    ) -> bool:
        """Submit a read of blocks that may have to come from the drive. Return whether it was submitted.

        `on_done` gets the bytes, or None if the caller must read through the store. The memory belongs to
        this object until then, as the caller may be gone.
        """
        first = offset >> 12
        if located.source.connection.closed or offset + length > located.blocks << 12:
            return False
        runs = self.runs(located, first, length >> 12)
        if runs is None:
            return False
        into = _memory(length)
        positions = [0]
        for _, count in runs[:-1]:
            positions.append(positions[-1] + count)
        source = located.source
        if self._reader is None:
            self._reader = reader_for(source.fd)
        self.counters["cold"] += 1
        self._number = number = self._number + 1
        self.waiting[number] = self.now_s(), on_done
        direct = source.reads_direct(runs, length)
        self._reader.begin(
            source.direct_fd if direct else source.fd,
            [run[0] for run in runs],
            [run[1] for run in runs],
            positions,
            into,
            partial(self._came, located, first, into, number, direct),
        )
        return True

    def _came(
        self,
        located: BlockLocations,
        first: int,
        into: memoryview,
        number: int,
        direct: bool,
        outcome: Outcome,
    ) -> None:
        _, on_done = self.waiting.pop(number, (0.0, None))
        if direct and any(outcome):
            located.source.takes_direct = False  # perhaps this drive only needs larger blocks
        if on_done is None:  # the read took too long, and the store was asked
            return
        on_done(into if not any(outcome) and self.good(located, first, into) else None)

    def may_serve(self, target: int) -> bool:
        """Whether reads of this target may be short-circuit reads, now or soon."""
        return self.on and (target in self.sources or self._not_before.get(target, 0.0) <= self.now_s())

    # -- locations -----------------------------------------------------------------------------------------------------------

    def want(self, file: OpenInode, index: int, lane) -> None:
        """Request the locations of a chunk that a read did not find located, and of its neighbours.

        Requests of one event-loop iteration travel together. The first read of a file requests nothing, and
        reads request seldom while no location is used.
        """
        if not file.missed:
            file.missed = True
            return
        if lane.target not in self.sources:
            self._introduce(lane)
            return
        if (file.inode, index) in self._asked:
            return
        count = min(GROUP, CREDIT - file.owes)
        if count <= 0:
            file.denied += 1
            if file.denied % SELDOM:
                return
            count = 1
        first = index - index % count
        file.owes += self._want_all(file, first, min(first + count - 1, file.size - 1 >> file.chunk_bits))

    def want_ahead(self, file: OpenInode, first: int, last: int) -> None:
        """Request locations ahead of a sequential reader."""
        edge = min(last, first + AHEAD - 1)
        if edge not in file.located and (file.inode, edge) not in self._asked:
            self._want_all(file, first, min(last, first + GROUP - 1))

    def _want_all(self, file: OpenInode, first: int, last: int) -> int:
        """Request locations of chunks that lack one, if their targets allow it; return their number.

        A file of an encrypted volume has no location before its key is known: its bytes could not be
        decrypted.
        """
        if file.encrypted and file.key is None:
            return 0
        count = 0
        for index in range(first, last + 1):
            name = (file.inode, index)
            if index in file.located or name in self._asked or self._distrusted.get(name, 0.0) > self.now_s():
                continue
            try:
                lane = file.lanes.get(index) or self._find_lane(file, index)
            except Stale:
                break
            if lane.target in self.sources:
                self._want(file, index, lane, 0)
                count += 1
        return count

    def _want(self, file: OpenInode, index: int, lane, version: int) -> None:
        if len(self._asked) >= 16 * LOCATE_ENTRIES_MAX:
            return
        if not self._wanted:
            self._loop.call_soon(self._ask)
        self._asked.add((file.inode, index))
        self._wanted.setdefault(lane, {})[file.inode, index] = file, version

    def _ask(self) -> None:
        wanted, self._wanted = self._wanted, {}
        for lane, names in wanted.items():
            connection = self._dialer.live(lane.endpoints)
            source = self.sources.get(lane.target)
            if connection is None or source is None:
                self._asked.difference_update(names)
                continue
            entries = list(names.items())
            for at in range(0, len(entries), LOCATE_ENTRIES_MAX):
                self._ask_some(lane, source, connection, entries[at : at + LOCATE_ENTRIES_MAX])

    def _ask_some(self, lane, source: LocalDrive, connection, entries: list) -> None:
        places: dict[bytes, int] = {}
        packed = bytearray()
        for (inode, index), (file, version) in entries:
            blocks = min(file.size - (index << file.chunk_bits), 1 << file.chunk_bits) + BLOCK_BYTES - 1 >> 12
            packed += LOCATE_ENTRY.pack(
                inode, index, max(0, blocks), places.setdefault(file.grant, len(places)), version
            )
        request = data_pb2.LocateRequest(
            map_epoch=self._epoch(),
            target=lane.target,
            grants=list(places),
            token=source.token,
            entries=bytes(packed),
        )
        request.past = b"".join(
            [PAST_READS.pack(inode, *figures) for inode, figures in source.past.items()][:PAST_ENTRIES_MAX]
        )
        source.past.clear()
        sent_s = self.now_s()
        asked = [(file, index, file.changes) for (_, index), (file, _) in entries]
        connection.submit(
            wire_pb2.DATA_LOCATE,
            request.SerializeToString(),
            deadline_s=sent_s + 5.0,
            on_done=partial(self._answered, source, connection, asked, sent_s),
        )

    def _answered(self, source: LocalDrive, connection, asked: list, sent_s: float, reply, error) -> None:
        self._asked.difference_update([(file.inode, index) for file, index, _ in asked])
        if self.sources.get(source.target) is not source:
            return
        if error is None:
            try:
                answer = decoded(data_pb2.LocateReply, reply.message)
                results = list(LOCATE_RESULT.iter_unpack(answer.results))
                if len(results) == len(asked):
                    source.connection = connection
                    self._install(source, asked, results, answer, sent_s)
                    return
                error = CorruptFrame("a store's answer to a question for places does not fit it")
            except (CorruptFrame, struct.error, ValueError) as raised:
                error = raised
        # another process serves the target now
        if isinstance(error, (AccessDenied, NotSupported, CorruptFrame)):
            self._forget_source(source)
            self._not_before[source.target] = self.now_s() + (
                AGAIN_REFUSED_S if isinstance(error, NotSupported) else 0.0
            )
        elif not isinstance(error, NvpoolError):
            log.warning("places from target %d: %s", source.target, error)

    def _install(self, source: LocalDrive, asked: list, results: list, answer, sent_s: float) -> None:
        runs, sums = array("Q", answer.runs), answer.checksums
        at = place = 0
        for (file, index, changes), (status, flags, run_count, blocks, life_ms, slot, stamp, version) in zip(
            asked, results, strict=True
        ):
            first, at = at, at + run_count
            begin = place
            if run_count:
                place += 4 * blocks
            known = file.located.get(index)
            if (
                status
                or not life_ms
                or file.changes != changes
                or not file.handles
                or slot >= len(source.table)
            ):
                if known is not None:
                    self._drop(known)
                continue
            if flags & SAME_VERSION:
                if known is None or known.version != version or known.source is not source:
                    continue
                located = known
            else:
                if at > len(runs) or place > len(sums):
                    raise CorruptFrame("places are missing in a store's answer")
                if known is not None:
                    self._drop(known)
                located = BlockLocations(file, index, source)
                located.version, located.blocks, located.sums = version, blocks, sums[begin:place]
                located.base, located.places = _places(runs[first:at], blocks)
                located.bytes = _ENTRY_BYTES + len(located.sums) + 8 * len(located.places)
                self.byte_count += located.bytes
                self.counters["located"] += 1
            located.until, located.slot, located.stamp = sent_s + life_ms / 1000, slot, stamp
            self._note_reads(located)
            located.used = located.reported = 0
            file.located[index] = located  # last, because other threads read it
            self._order.append((located.until, located))
        while self.byte_count > self.bytes_max and self._order:
            self._drop(self._order.popleft()[1])

    @staticmethod
    def _note_reads(located: BlockLocations) -> None:
        """Queue the location's read statistics for the next request to its store.

        Reads that another thread counts at this moment are missed: these are only statistics.
        """
        if located.read_bytes:
            figures = located.source.past.setdefault(located.file.inode, [0, 0])
            figures[0] += located.used - located.reported
            figures[1] += located.read_bytes
            located.reported, located.read_bytes = located.used, 0

    def _drop(self, located: BlockLocations) -> None:
        self._note_reads(located)
        self.byte_count -= located.bytes
        located.bytes = 0
        located.until = 0.0
        if located.file.located.get(located.index) is located:
            del located.file.located[located.index]

    def forget(self, file: OpenInode) -> None:
        """Drop all locations of the file, and those of replies in flight."""
        file.changes += 1
        for located in list(file.located.values()):
            self._drop(located)

    def forget_chunk(self, file: OpenInode, index: int) -> None:
        """Drop the location of a chunk that this client has written."""
        file.changes += 1
        located = file.located.get(index)
        if located is not None:
            self._drop(located)

    # -- targets -------------------------------------------------------------------------------------------------------------

    def _introduce(self, lane) -> None:
        target = lane.target
        if not self.on or target in self._introducing or self._not_before.get(target, 0.0) > self.now_s():
            return
        path = _handover_path(lane.endpoints)
        if not path:
            self._not_before[target] = self.now_s() + AGAIN_REFUSED_S
            return
        self._introducing[target] = self._loop.create_task(self._take(target, path))

    async def _take(self, target: int, path: str) -> None:
        again_s = AGAIN_S
        try:
            asked_s = self.now_s()
            source = LocalDrive(target, *await take(path, AGAIN_S), self._direct_reads, asked_s=asked_s)
            self.sources[target] = source
            log.debug("target %d lets us read its drive", target)
        except NvpoolError as error:
            if not isinstance(error, Unavailable):
                again_s = AGAIN_REFUSED_S
            log.debug("target %d does not let us read its drive: %s", target, error)
        finally:
            self._not_before[target] = self.now_s() + again_s
            del self._introducing[target]

    def _forget_source(self, source: LocalDrive) -> None:
        if self.sources.get(source.target) is source:
            del self.sources[source.target]
        for _, located in self._order:
            if located.source is source:
                self._drop(located)
        self._order = deque(one for one in self._order if one[1].source is not source)
        # Reads of it may be in flight: its descriptor is closed when they must have ended.
        self._left.append(source)
        while len(self._left) > LEFT_MAX and not self.waiting:
            self._left.pop(0).close()

    # -- background ----------------------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Renew locations that were used and end soon; drop unused ones. Called about twice a second."""
        now_s = self.now_s()
        order = self._order
        for _ in range(len(order)):
            until, located = order[0]
            if located.until != until:  # renewed or dropped
                order.popleft()
                continue
            if until - now_s > RENEW_S:
                break
            order.popleft()
            file = located.file
            lane = file.lanes.get(located.index)
            if (
                not (until > now_s and located.used and file.handles and lane)
                or located.source.connection.closed
            ):
                self._drop(located)
                continue
            order.append((until, located))  # stays until the reply comes
            if (file.inode, located.index) not in self._asked:
                self._want(file, located.index, lane, located.version)
            self._note_reads(located)
        while self.waiting:
            number, (begun_s, on_done) = next(iter(self.waiting.items()))
            if begun_s > now_s - SLOW_S:
                break
            del self.waiting[number]
            on_done(None)
        if self._distrusted:
            self._distrusted = {name: until for name, until in self._distrusted.items() if until > now_s}

    async def close(self) -> None:
        self.on = False
        for task in list(self._introducing.values()):
            task.cancel()
        if self._introducing:
            await asyncio.wait(list(self._introducing.values()), timeout=1.0)
        while self._order:
            self._drop(self._order.popleft()[1])
        if self._reader is not None:
            await self._reader.close()
            await asyncio.sleep(0)  # the callbacks of its pending reads run
        sources, self.sources = [*self.sources.values(), *self._left], {}
        for source in sources:
            source.close()


def _memory(length: int) -> memoryview:
    """A buffer; a large one starts at a page boundary."""
    return SPARES.take(length) if length >= DIRECT_READ_BYTES else memoryview(bytearray(length))


def _places(runs: array, blocks: int) -> tuple[int, array]:
    """(base, places) for BlockLocations. CorruptFrame: the runs do not cover the blocks."""
    if len(runs) == 1 and runs[0] >> 12 and (runs[0] & 4095) + 1 == blocks:
        return runs[0] >> 12, array("Q")
    places = array("Q")
    for run in runs:
        place, count = run >> 12, (run & 4095) + 1
        places.extend(range(place, place + count) if place else [0] * count)
    if len(places) != blocks:
        raise CorruptFrame("the places in a store's answer are not as many as its blocks")
    return 0, places


def _handover_path(endpoints: tuple[str, ...]) -> str:
    """The socket where a daemon of this host hands out descriptors; "" if there is none."""
    for endpoint in endpoints:
        try:
            where = parse_endpoint(endpoint)
        except InvalidRequest:
            continue
        if where.scheme == "stream+unix" and (not where.host_id or where.host_id == host_id()):
            path = path_beside(where.path)
            if os.path.exists(path):
                return path
    return ""
