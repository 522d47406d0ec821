"""The short cut: reading drives of this host without asking their daemon for the bytes.

A store that lets us hands over a read-only descriptor of its data file or device and of its table of changes, and answers where
the blocks of chunks lie, with their checksums and a lifetime (store/chunks/location_leases says what that protects). Reading is
then one preadv, and what the kernel has in memory is there at once, without a task and without an await.

Guarantees what a read through the store does. What was read is thrown away when the lifetime had ended by then (counted from
the sending of the question, on CLOCK_BOOTTIME), when the chunk has changed (its counter in the table is another one), when
the target's right to serve has ended (its time stands in the table), when the connection to the store is gone, or when a
checksum does not fit; the store is then asked in the ordinary way, which looks after damage. Blocks that were not there when
we asked are never made up: they are read through the store. Memory is bounded; nothing here waits, and nothing fails: without a
location there is None.

Called by reader, batchread and chunkclient on one event loop; by threadreads from any thread (`look`, `hit`, `may_serve`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.reader import DIRECT_READ_BYTES, reader_for
from nvpool.client.data.local_drive import Source
from nvpool.client.state.attr_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.core.checksum import block_checksums, crc32c
from nvpool.core.clock import Clock
from nvpool.core.containers.buffer_pool import SPARES
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import AccessDenied, CorruptFrame, InvalidRequest, NotSupported, NvpoolError, Stale, Unavailable
from nvpool.core.units import BLOCK_BYTES, KIB
from nvpool.host.processes import host_id
from nvpool.rpc.fd_passing import path_beside, take
from nvpool.rpc.messages.data_codec import LOCATE_ENTRIES_MAX, LOCATE_ENTRY, LOCATE_RESULT, PAST_READS, SAME_VERSION, decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

log = logging.getLogger(__name__)

NOW_BYTES_MAX = 1024 * KIB
"""Read at once, from memory: some 200 µs. More is cut up by who asks."""
AGAIN_S, AGAIN_REFUSED_S = 1.0, 30.0
"""Before a target is asked for its descriptors again: one that was not there, one that does not give us any."""
DISTRUST_S = 10.0
"""A chunk with a block that did not fit its checksum is read through its store so long."""
RENEW_S = 2.0
"""Before it ends a location that was used is renewed, and one that was not is forgotten."""
LEFT_MAX = 4
"""Descriptors of dead processes that are kept for reads under way."""
COLD = 8
"""So many reads in a row that were not in memory: while some wait for the drive the next are not tried, but for one in PROBE.
They are submitted with what else comes in this turn of the loop, so that the drive is told of them once. (16 readers of 4 KiB,
cold: 12 k reads/s became 18 to 24 k.)"""
PROBE = 16
SLOW_S = 3.0
"""A drive that takes longer for a read: its store is asked, whose answer has a deadline."""
AHEAD = 16
"""Where one of the so many chunks before a sequential reader is not located, GROUP of them are. An answer comes behind what the
store reads for him meanwhile: asked for one by one, places came when their bytes had just been asked for, for ever."""
CREDIT = 1024
"""Chunks of a file that are located before any of them needs to have been read there; then each read that hits earns one more.
A file of 1 GiB is located whole by its first dozen misses: some 20 ms of its store, 1.5 MiB here."""
GROUP = 64
"""Neighbours that are located with a chunk, as far as the credit reaches: random reads come to them too."""
SELDOM = 16
"""Without credit one miss of so many asks, for its own chunk."""
ABSENT, COLD_BLOCKS, LATE, WRONG = range(1, 5)
"""Why a look found nothing: no such blocks are located, they are not in memory, it came too late, a checksum does not fit."""
PAST_MAX = 4096
"""Inodes of which a store is told at once what was read here."""
_ENTRY_BYTES = 400
_NOWAIT = os.RWF_NOWAIT


class Located:
    """Where the first `blocks` blocks of a chunk lie: from disk block `base` on, or each at `places` (0: a hole)."""

    __slots__ = ("file", "index", "source", "until", "slot", "stamp", "version", "blocks", "base", "places", "sums", "bytes",
                 "used", "read_bytes", "told")

    def __init__(self, file: OpenInode, index: int, source: Source):
        self.file = file
        self.index = index
        self.source = source
        self.used = self.read_bytes = self.told = 0
        """Reads since it was located or renewed, bytes that its store was not told of yet, reads that it was told of."""


class ShortCut:
    def __init__(self, dialer, options: ClientOptions, clock: Clock, *, epoch: Callable[[], int], find_lane: Callable):
        self._dialer = dialer
        self._find_lane = find_lane
        self.clock = clock
        self._now_s = clock.boottime_s
        self._epoch = epoch
        self._bytes_max = options.locations_bytes
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self.on = options.short_cut and options.locations_bytes > 0
        self._direct_reads = options.direct_reads
        self._sources: dict[int, Source] = {}
        self._left: list[Source] = []
        self._not_before: dict[int, float] = {}
        self._introducing: dict[int, asyncio.Task] = {}
        self._wanted: dict = {}  # lane -> {(inode, index): (file, version that is here)}
        self._asked: set[tuple[int, int]] = set()
        self._distrusted: dict[tuple[int, int], float] = {}
        self._order: deque[tuple[float, Located]] = deque()
        self._reader: WaitingReader | None = None
        self._number = 0
        self._cold_reads = 0  # in a row
        self.waiting: dict[object, tuple[float, Callable[[memoryview | None], None]]] = {}
        """Reads that the drive is asked for, the oldest first: when each began, and what is called with None when that is too
        long ago and its store has to be asked."""
        self.counters = {"hits": 0, "cold": 0, "located": 0, "late": 0, "mismatches": 0}

    # -- reading -----------------------------------------------------------------------------------------------------------

    def read_now(self, located: Located, offset: int, length: int) -> memoryview | None:
        """The whole blocks [offset, offset + length) of the chunk, when the kernel has them in memory; the caller's to keep."""
        if self._cold_reads >= COLD and self.waiting:
            self._cold_reads += 1
            if self._cold_reads % PROBE:
                return None
        found = self.look(located, offset, length)
        if type(found) is memoryview:
            self._cold_reads = 0
            self.hit(located, length)
            return found
        if found == COLD_BLOCKS:
            self._cold_reads += 1
        else:
            self.note(located, found)
        return None

    def look(self, located: Located, offset: int, length: int) -> memoryview | int:
        """As `read_now`, but that why there is nothing is told and not acted upon. So any thread may call it."""
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
            except OSError:  # not in memory; anything else shows again when it is read through the store
                return COLD_BLOCKS
        else:
            runs = self.runs(located, first, length >> 12)
            if runs is None or source.reads_direct(runs, length):
                return ABSENT
            into = _memory(length)
            at = 0
            try:
                for place, count in runs:
                    if os.preadv(source.fd, (into[at:at + count],), place, _NOWAIT) != count:
                        return ABSENT
                    at += count
            except OSError:
                return COLD_BLOCKS
        wrong = self._judge(located, first, into)
        if not wrong:
            self._decrypt(located, first, into)
        return wrong or into

    @staticmethod
    def _decrypt(located: Located, first: int, into: memoryview) -> None:
        """What was read of an encrypted volume, in place."""
        file = located.file
        if file.key is not None:
            file.key.cipher.decrypt(file.inode, located.index, first, into, into)

    def good(self, located: Located, first: int, into: memoryview) -> bool:
        """As `fits`; if so, `into` has it decrypted."""
        is_good = self.fits(located, first, into)
        if is_good:
            self._decrypt(located, first, into)
        return is_good

    def fits(self, located: Located, first: int, into: memoryview) -> bool:
        """Whether what was just read is what the blocks from `first` on hold now, as it is stored."""
        wrong = self._judge(located, first, into)
        if wrong:
            self.note(located, wrong)
        else:
            self.hit(located, len(into))
        return not wrong

    def _judge(self, located: Located, first: int, into: memoryview) -> int:
        """What is wrong with what was just read, 0 for nothing. The clock and the counter are looked at after the read: only
        so they say that it was in time."""
        source, now_s = located.source, self._now_s()
        if (source.connection.closed or now_s >= located.until or source.table[located.slot] != located.stamp
                or now_s + source.shift >= source.serving[0]):
            return LATE
        sums = crc32c(into).to_bytes(4, "little") if len(into) == BLOCK_BYTES else block_checksums(into)
        return 0 if sums == located.sums[4 * first:4 * first + len(sums)] else WRONG

    def note(self, located: Located, wrong: int) -> None:
        """Act upon what a look, or a judgement, has found."""
        if wrong == LATE:
            self._late(located)
        elif wrong == WRONG:
            self._mismatch(located)

    def hit(self, located: Located, length: int) -> None:
        """Note that a look has brought so many bytes; from any thread."""
        located.used += 1
        located.read_bytes += length
        file = located.file
        if file.owes > 0:
            file.owes -= 1
        self.counters["hits"] += 1

    @staticmethod
    def runs(located: Located, first: int, count: int) -> list[tuple[int, int]] | None:
        """(place, bytes) of the blocks in order; None when one of them is not there."""
        if located.base:
            return [(located.base + first << 12, count << 12)]
        runs: list[tuple[int, int]] = []
        begin = end = 0
        for place in located.places[first:first + count]:
            if not place:
                return None
            if place != end:
                if begin:
                    runs.append((begin << 12, end - begin << 12))
                begin = place
            end = place + 1
        runs.append((begin << 12, end - begin << 12))
        return runs

    def _late(self, located: Located) -> None:
        self.counters["late"] += 1
        self._drop(located)

    def _mismatch(self, located: Located) -> None:
        self.counters["mismatches"] += 1
        file = located.file
        log.warning("a block of chunk %d of inode %d, read from target %d's drive, does not have its checksum; its store is "
                    "asked", located.index, file.inode, located.source.target)
        if len(self._distrusted) > 1000:
            self._distrusted.clear()
        self._distrusted[file.inode, located.index] = self._now_s() + DISTRUST_S
        self._drop(located)

    def try_read(self, file: OpenInode, index: int, offset: int, length: int, lane,
                 on_done: Callable[[memoryview | None], None], *, missed: bool = False) -> bool:
        """Read from the drive ourselves, where we know where: whether that is done or begun. `on_done` as in `begin`; it may be
        called before this returns. `missed`: `read_now` has just been tried."""
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

    def begin(self, located: Located, offset: int, length: int, on_done: Callable[[memoryview | None], None]) -> bool:
        """Read blocks that may have to come from the drive; `on_done` gets them, or None when they are to be read through the
        store. Whether that was begun. The memory is ours until then: whoever asked may have gone."""
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
        self.waiting[number] = self._now_s(), on_done
        direct = source.reads_direct(runs, length)
        self._reader.begin(source.direct_fd if direct else source.fd, [run[0] for run in runs], [run[1] for run in runs],
                           positions, into, partial(self._came, located, first, into, number, direct))
        return True

    def _came(self, located: Located, first: int, into: memoryview, number: int, direct: bool, outcome: Outcome) -> None:
        _, on_done = self.waiting.pop(number, (0.0, None))
        if direct and any(outcome):
            located.source.takes_direct = False  # it may only be that this drive wants larger blocks
        if on_done is None:  # it took too long, and the store was asked
            return
        on_done(into if not any(outcome) and self.good(located, first, into) else None)

    def may_serve(self, target: int) -> bool:
        """Whether reads of this target may come to the short cut, now or soon."""
        return self.on and (target in self._sources or self._not_before.get(target, 0.0) <= self._now_s())

    # -- locations -----------------------------------------------------------------------------------------------------------

    def want(self, file: OpenInode, index: int, lane) -> None:
        """A read of the chunk did not find it located: ask where it and its neighbours lie, with what else is wanted in this
        turn of the loop. Asks nothing for the first read of a file, and seldom where nothing hits."""
        if not file.missed:
            file.missed = True
            return
        if file.encrypted and file.key is None:
            return
        if lane.target not in self._sources:
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
        """A sequential reader comes to these chunks."""
        edge = min(last, first + AHEAD - 1)
        if edge not in file.located and (file.inode, edge) not in self._asked:
            self._want_all(file, first, min(last, first + GROUP - 1))

    def _want_all(self, file: OpenInode, first: int, last: int) -> int:
        """How many of these chunks are asked for now: what is not located, and whose target lends to us."""
        count = 0
        for index in range(first, last + 1):
            name = (file.inode, index)
            if index in file.located or name in self._asked or self._distrusted.get(name, 0.0) > self._now_s():
                continue
            try:
                lane = file.lanes.get(index) or self._find_lane(file, index)
            except Stale:
                break
            if lane.target in self._sources:
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
            source = self._sources.get(lane.target)
            if connection is None or source is None:
                self._asked.difference_update(names)
                continue
            entries = list(names.items())
            for at in range(0, len(entries), LOCATE_ENTRIES_MAX):
                self._ask_some(lane, source, connection, entries[at:at + LOCATE_ENTRIES_MAX])

    def _ask_some(self, lane, source: Source, connection, entries: list) -> None:
        places: dict[bytes, int] = {}
        packed = bytearray()
        for (inode, index), (file, version) in entries:
            blocks = min(file.size - (index << file.chunk_bits), 1 << file.chunk_bits) + BLOCK_BYTES - 1 >> 12
            packed += LOCATE_ENTRY.pack(inode, index, max(0, blocks), places.setdefault(file.grant, len(places)), version)
        request = data_pb2.LocateRequest(map_epoch=self._epoch(), target=lane.target, grants=list(places), token=source.token,
                                         entries=bytes(packed))
        request.past = b"".join([PAST_READS.pack(inode, *figures) for inode, figures in source.past.items()][:PAST_MAX])
        source.past.clear()
        sent_s = self._now_s()
        asked = [(file, index, file.changes) for (_, index), (file, _) in entries]
        connection.submit(wire_pb2.DATA_LOCATE, request.SerializeToString(), deadline_s=sent_s + 5.0,
                          on_done=partial(self._answered, source, connection, asked, sent_s))

    def _answered(self, source: Source, connection, asked: list, sent_s: float, reply, error) -> None:
        self._asked.difference_update([(file.inode, index) for file, index, _ in asked])
        if self._sources.get(source.target) is not source:
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
        if isinstance(error, (AccessDenied, NotSupported, CorruptFrame)):  # another process serves the target now
            self._forget_source(source)
            self._not_before[source.target] = self._now_s() + (AGAIN_REFUSED_S if isinstance(error, NotSupported) else 0.0)
        elif not isinstance(error, NvpoolError):
            log.warning("places from target %d: %s", source.target, error)

    def _install(self, source: Source, asked: list, results: list, answer, sent_s: float) -> None:
        runs, sums = array("Q", answer.runs), answer.checksums
        at = place = 0
        for (file, index, changes), (status, flags, run_count, blocks, life_ms, slot, stamp, version) in zip(asked, results,
                                                                                                       strict=True):
            first, at = at, at + run_count
            begin = place
            if run_count:
                place += 4 * blocks
            known = file.located.get(index)
            if status or not life_ms or file.changes != changes or not file.handles or slot >= len(source.table):
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
                located = Located(file, index, source)
                located.version, located.blocks, located.sums = version, blocks, sums[begin:place]
                located.base, located.places = _places(runs[first:at], blocks)
                located.bytes = _ENTRY_BYTES + len(located.sums) + 8 * len(located.places)
                self._bytes += located.bytes
                self.counters["located"] += 1
            located.until, located.slot, located.stamp = sent_s + life_ms / 1000, slot, stamp
            self._note_reads(located)
            located.used = located.told = 0
            file.located[index] = located  # not before: other threads look at it
            self._order.append((located.until, located))
        while self._bytes > self._bytes_max and self._order:
            self._drop(self._order.popleft()[1])

    @staticmethod
    def _note_reads(located: Located) -> None:
        """They are told to its store with the next question. What another thread adds just now is missed: these are figures."""
        if located.read_bytes:
            figures = located.source.past.setdefault(located.file.inode, [0, 0])
            figures[0] += located.used - located.told
            figures[1] += located.read_bytes
            located.told, located.read_bytes = located.used, 0

    def _drop(self, located: Located) -> None:
        self._note_reads(located)
        self._bytes -= located.bytes
        located.bytes = 0
        located.until = 0.0
        if located.file.located.get(located.index) is located:
            del located.file.located[located.index]

    def forget(self, file: OpenInode) -> None:
        """Nothing that is known of the file's places holds any longer, nor what is being asked."""
        file.changes += 1
        for located in list(file.located.values()):
            self._drop(located)

    def forget_chunk(self, file: OpenInode, index: int) -> None:
        """A write of ours has changed the chunk."""
        file.changes += 1
        located = file.located.get(index)
        if located is not None:
            self._drop(located)

    # -- targets -------------------------------------------------------------------------------------------------------------

    def _introduce(self, lane) -> None:
        target = lane.target
        if not self.on or target in self._introducing or self._not_before.get(target, 0.0) > self._now_s():
            return
        path = _handover_path(lane.endpoints)
        if not path:
            self._not_before[target] = self._now_s() + AGAIN_REFUSED_S
            return
        self._introducing[target] = self._loop.create_task(self._take(target, path))

    async def _take(self, target: int, path: str) -> None:
        again_s = AGAIN_S
        try:
            asked_s = self._now_s()
            source = Source(target, *await take(path, AGAIN_S), self._direct_reads, asked_s=asked_s)
            self._sources[target] = source
            log.debug("target %d lets us read its drive", target)
        except NvpoolError as error:
            if not isinstance(error, Unavailable):
                again_s = AGAIN_REFUSED_S
            log.debug("target %d does not let us read its drive: %s", target, error)
        finally:
            self._not_before[target] = self._now_s() + again_s
            del self._introducing[target]

    def _forget_source(self, source: Source) -> None:
        if self._sources.get(source.target) is source:
            del self._sources[source.target]
        for _, located in self._order:
            if located.source is source:
                self._drop(located)
        self._order = deque(one for one in self._order if one[1].source is not source)
        # Reads of it may be under way: its descriptor goes when they must have ended.
        self._left.append(source)
        while len(self._left) > LEFT_MAX and not self.waiting:
            self._left.pop(0).close()

    # -- background ----------------------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Renew what was used since it was located and ends soon, forget what was not. Called about twice a second."""
        now_s = self._now_s()
        order = self._order
        for _ in range(len(order)):
            until, located = order[0]
            if located.until != until:  # renewed, or gone
                order.popleft()
                continue
            if until - now_s > RENEW_S:
                break
            order.popleft()
            file = located.file
            lane = file.lanes.get(located.index)
            if not (until > now_s and located.used and file.handles and lane) or located.source.connection.closed:
                self._drop(located)
                continue
            order.append((until, located))  # until the answer comes
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
            await asyncio.sleep(0)  # what it had in hand is told
        sources, self._sources = [*self._sources.values(), *self._left], {}
        for source in sources:
            source.close()


def _memory(length: int) -> memoryview:
    """Large pieces of it begin at a page."""
    return SPARES.take(length) if length >= DIRECT_READ_BYTES else memoryview(bytearray(length))


def _places(runs: array, blocks: int) -> tuple[int, array]:
    """(base, places) of a Located. CorruptFrame when the runs do not cover the blocks."""
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
    """Where a daemon of this host hands out descriptors; "" where none may be."""
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
