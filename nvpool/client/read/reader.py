"""Reads of open files: local unstored writes first, then read-ahead, then the stores.

Guarantees: a read sees all bytes that were written on this client before it began. A read is short only at
the end of the file, as this client knows it. Read-ahead is bounded per handle and in total; a write, a
truncation or `_UNIT_LIFE_S` drops it. Random reads cost no task and no copy: the result is a view of the
received payload. Used by vfs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from nvpool.client.data.read_queue import Read
from nvpool.client.data.short_circuit import NOW_BYTES_MAX
from nvpool.client.state.leases import Leases
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.small_file_cache import SMALL_BYTES, Contents
from nvpool.client.state.vfs_types import ReadAheadState, ReadAheadUnit
from nvpool.client.write.writeback import Writer
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Stale
from nvpool.core.futures import BlocksFuture, ImmediateFuture
from nvpool.core.units import KIB

_UNIT_BITS_MAX = 20
_SEQUENTIAL_BYTES = 128 * KIB
"""A run of at least two reads and this length makes a handle a sequential reader."""
_UNIT_LIFE_S = 3.0
"""Life of read-ahead bytes: close-to-open would allow longer, but people who follow a log would notice."""
EMPTY = memoryview(b"")


class SmallFilePart(ImmediateFuture):
    """A read of the bytes [offset, end) of a small file, whose whole content is being fetched."""

    __slots__ = ("offset", "finish")

    def __init__(self, offset: int, finish: int) -> None:
        self.on_end = self.outcome = self.then = None
        self.offset = offset
        self.finish = finish


class WholeFileFetch:
    """A fetch of a whole small file without local writes, as the future of a `Read`.

    Other reads of the file wait for the same reply in `parts`; `parts` is None when the reply has arrived.
    """

    __slots__ = ("file", "change", "size", "asked_s", "parts", "came")

    def __init__(
        self,
        file: OpenInode,
        asked_s: float,
        parts: list[SmallFilePart],
        came: Callable[[WholeFileFetch, bytes], None],
    ) -> None:
        self.file = file
        self.change = file.attr.change
        self.size = file.attr.size
        self.asked_s = asked_s
        self.parts: list[SmallFilePart] | None = parts
        self.came = came

    def done(self) -> bool:
        return self.parts is None

    def set_result(self, blocks: memoryview) -> None:
        self.came(self, bytes(blocks[: self.size]))

    def set_exception(self, error: BaseException) -> None:
        file, parts, self.parts = self.file, self.parts, None
        if file.fetching is self:
            file.fetching = None
        for part in parts:
            part.end(None, error)


class Reader:
    """The reads of a client."""

    def __init__(
        self,
        chunks,
        batches,
        writer: Writer,
        options: ClientOptions,
        clock: Clock,
        leases: Leases,
        *,
        refresh: Callable[[OpenInode, int], Awaitable[None]],
    ):
        self._leases = leases
        self.contents = Contents(options.small_bytes, leases, clock)
        self._chunks = chunks
        self._batches = batches
        self._writer = writer
        self._options = options
        self._clock = clock
        self.refresh = refresh
        self.ahead_bytes = 0
        self.counters = {"ahead_hits": 0, "ahead_bytes": 0}

    async def read(
        self, file: OpenInode, ahead: ReadAheadState, offset: int, length: int
    ) -> memoryview | bytes:
        """Read the bytes [offset, offset + length) of the file; fewer only at its end.

        The caller owns the result. Raises the errors of ChunkClient.read. May be repeated.
        """
        size = file.size
        end = offset + length
        if end > size:
            if (
                file.attr_born_s + self._options.attr_s <= self._clock.boottime_s()
                and self._leases.held(file.inode) is None
            ):
                await self.refresh(file, 0)  # another client may have made the file longer
                size = file.size
            if end > size:
                end = size
            if offset >= end:
                return EMPTY
            length = end - offset
        written = file.written
        if written is None:
            if size <= SMALL_BYTES and self._options.small_bytes:
                content = self.content(file) or await self._read_whole(file)
                return memoryview(content)[offset:end]
        elif written.dirty or written.sending:
            laid = self._writer.overlay(file, offset, end)
            if laid:
                return await self._read_over(file, offset, length, laid)
        if offset == ahead.next or ahead.units:
            sequential = self._follow(file, ahead, offset, end, size)
            if sequential:
                found = await self._from_units(file, ahead, offset, end)
                if found is not None:
                    return found
        else:
            ahead.run = ahead.reads = 0
        ahead.next = end
        index = offset >> file.chunk_bits
        if (end - 1) >> file.chunk_bits == index:
            # fast path for the common read: one chunk
            skip = offset & 4095
            span = skip + length + 4095 & -4096
            block = await self._chunks.read(file, index, (offset & file.chunk_mask) - skip, span)
            return block if span == length else block[skip : skip + length]
        return await self._chunks.read_range(file, offset, length)

    def begin_small(self, file: OpenInode, offset: int, length: int, then: Callable) -> SmallFilePart | None:
        """Submit a read of a small file without a task. The caller has tried `content_now` before.

        `then` as in ImmediateFuture. None: there was no side effect; the file is not small, has local writes, or its
        end must be requested.
        """
        size = file.attr.size
        if size > SMALL_BYTES or file.written is not None or offset >= size or not self._options.small_bytes:
            return None
        end = offset + length
        if end > size:
            if (
                file.attr_born_s + self._options.attr_s <= self._clock.boottime_s()
                and self._leases.held(file.inode) is None
            ):
                return None
            end = size
        part = SmallFilePart(offset, end)
        part.then = then
        self._want_whole(file, part)
        return part

    def begin(self, file: OpenInode, ahead: ReadAheadState, offset: int, length: int) -> BlocksFuture | None:
        """Submit a random read within one chunk without a task. The caller has tried `read_now` before.

        None: there was no side effect; the read is sequential, spans chunks, or depends on local writes.
        """
        written = file.written
        if (
            (written is not None and (written.dirty or written.sending))
            or offset == ahead.next
            or ahead.units
        ):
            return None
        size = file.size
        if size <= SMALL_BYTES or offset + length > size:
            return None
        bits = file.chunk_bits
        index = offset >> bits
        if offset + length - 1 >> bits != index:
            return None
        ahead.run = ahead.reads = 0
        ahead.next = offset + length
        skip = offset & 4095
        coming = BlocksFuture(skip, length)
        self._chunks.begin(
            file, index, (offset & file.chunk_mask) - skip, skip + length + 4095 & -4096, coming, missed=True
        )
        return coming

    def read_now(self, file: OpenInode, ahead: ReadAheadState, offset: int, length: int) -> memoryview | None:
        """As `read`, without waiting; else None. See FileData.read_now. `file.located` must not be empty."""
        written = file.written
        if (written is not None and (written.dirty or written.sending)) or ahead.units:
            return None
        end, size = offset + length, file.size
        if end > size:
            if (
                file.attr_born_s + self._options.attr_s <= self._clock.boottime_s()
                and self._leases.held(file.inode) is None
            ):
                return None  # another client may have made the file longer
            if offset >= size:
                return EMPTY
            end, length = size, size - offset
        bits = file.chunk_bits
        index = offset >> bits
        located = file.located.get(index)
        if located is None or length > NOW_BYTES_MAX:
            return None
        short = self._chunks.short
        skip = offset & 4095
        within = (offset & file.chunk_mask) - skip
        span = skip + length + 4095 & -4096
        if (end - 1) >> bits == index:
            found = short.read_now(located, within, span)
            if found is None:
                return None
            if span != length:
                found = found[skip : skip + length]
        else:
            found = self._read_now_across(file, offset, end)
            if found is None:
                return None
        # leave the state as `read` does, so that a miss continues where the hits ended
        if offset == ahead.next:
            ahead.run += length
            ahead.reads += 1
            if (
                within << 1 > file.chunk_mask
                and ahead.reads > 1
                and index + 1 not in file.located
                and end < size
            ):
                short.want_ahead(file, index + 1, size - 1 >> bits)
        else:
            ahead.run = ahead.reads = 0
        ahead.next = end
        return found

    def _read_now_across(self, file: OpenInode, offset: int, end: int) -> memoryview | None:
        """As `read_now`, for a range that spans chunks."""
        whole = memoryview(bytearray(end - offset))
        at = offset
        while at < end:
            index = at >> file.chunk_bits
            border = min(index + 1 << file.chunk_bits, end)
            located = file.located.get(index)
            skip = at & 4095
            found = located and self._chunks.short.read_now(
                located, (at & file.chunk_mask) - skip, skip + border - at + 4095 & -4096
            )
            if found is None:
                return None
            whole[at - offset : border - offset] = found[skip : skip + border - at]
            at = border
        return whole

    # -- small files -------------------------------------------------------------------------------------------------------

    def content(self, file: OpenInode) -> bytes | None:
        """All bytes of a small file if they are cached and current; else None."""
        return (
            self.contents.get(file.inode, file.attr.change)
            if file.written is None and not file.lost
            else None
        )

    def has_content(self, file: OpenInode) -> bool:
        """Whether `content` may return bytes."""
        return file.inode in self.contents

    def content_now(self, file: OpenInode, offset: int, length: int) -> memoryview | None:
        """As `read`, if the content is cached and the file's end needs no request; else None."""
        content = self.content(file)
        if content is None:
            return None
        if (
            offset + length > len(content)
            and file.attr_born_s + self._options.attr_s <= self._clock.boottime_s()
            and self._leases.held(file.inode) is None
        ):
            return None  # another client may have made the file longer
        return memoryview(content)[offset : offset + length]

    def forget_content(self, inode: int) -> None:
        """Drop the cached content, because the file changes here or may change unnoticed."""
        self.contents.forget(inode)

    def forget_contents(self) -> None:
        self.contents.forget_all()

    def target_of(self, file: OpenInode) -> int:
        """The target that has the file's first bytes; 0 if it is not known now."""
        try:
            return (file.lanes.get(0) or self._chunks.find_lane(file, 0)).target
        except Stale:
            return 0

    async def _read_whole(self, file: OpenInode) -> bytes:
        """Read a whole small file without local writes."""
        future = asyncio.get_running_loop().create_future()
        part = SmallFilePart(0, file.attr.size)
        part.on_end = partial(_settle, future)
        self._want_whole(file, part)
        return await future

    def _want_whole(self, file: OpenInode, part: SmallFilePart) -> None:
        whole = file.fetching
        if whole is not None and whole.change == file.attr.change:
            whole.parts.append(part)
            return
        file.fetching = whole = WholeFileFetch(file, self._clock.boottime_s(), [part], self._whole_came)
        self._chunks.begin(file, 0, 0, whole.size + 4095 & -4096, whole)

    def go_on_with(self, begun, parts: list[SmallFilePart]) -> Read:
        """Take over a fetch of a whole small file that another object began as `_want_whole` does.

        `parts` wait for it. `begun` is the file's `fetching`, unless that was ended.
        """
        file = begun.file
        whole = WholeFileFetch(file, begun.asked_s, parts, self._whole_came)
        whole.change, whole.size = begun.change, begun.file_bytes
        if file.fetching is begun:
            file.fetching = whole
        return Read(file, 0, 0, whole.size + 4095 & -4096, None, whole, begun.deadline_s)

    def _whole_came(self, whole: WholeFileFetch, content: bytes) -> None:
        file, parts, whole.parts = whole.file, whole.parts, None
        wanted = file.fetching is whole
        if wanted:
            file.fetching = None
        for part in parts:
            all_of_it = part.finish - part.offset == len(content)
            part.end(content if all_of_it else memoryview(content)[part.offset : part.finish], None)
        self.contents.counters["small_reads"] += 1
        # after a local write, truncation or lock during the fetch the content may be too old to be cached
        if wanted and file.attr.change == whole.change and file.written is None:
            self.contents.put(file.inode, whole.change, content, whole.asked_s)

    async def _read_over(self, file: OpenInode, offset: int, length: int, laid: list) -> memoryview:
        if len(laid) == 1 and laid[0][0] == offset and laid[0][1] == offset + length:
            return memoryview(laid[0][2])
        whole = bytearray(length)
        view = memoryview(whole)
        if not _covers(laid, offset, offset + length):
            view[:] = await self._chunks.read_range(file, offset, length)
        for start, end, part in laid:
            view[start - offset : end - offset] = part
        return view

    # -- read-ahead ------------------------------------------------------------------------------------------------------

    def _follow(self, file: OpenInode, ahead: ReadAheadState, offset: int, end: int, size: int) -> bool:
        """Record a read, and fetch ahead if the handle reads in sequence.

        Returns whether the fetched units may have the bytes of this read.
        """
        bits = min(file.chunk_bits, _UNIT_BITS_MAX)
        if offset == ahead.next:
            ahead.next = end
        elif not -(2 << bits) <= offset - ahead.next <= max(ahead.window, 1 << bits):
            self.forget(file, ahead)
            return False
        else:
            ahead.next = max(ahead.next, end)  # requests of one sequential reader may overtake one another
        ahead.run += end - offset
        ahead.reads += 1
        if ahead.reads < 2 or ahead.run < _SEQUENTIAL_BYTES:
            return bool(ahead.units)
        if ahead.far << bits >= size and not ahead.units:
            return False
        if file.written is not None and (file.written.dirty or file.written.sending):
            return bool(ahead.units)  # the stores do not have all written bytes yet
        ahead.window = min(self._options.read_ahead_bytes, max(1 << bits, ahead.run * 2))
        now_s = self._clock.boottime_s()
        first = end + (1 << bits) - 1 >> bits
        if offset & (1 << bits) - 1 == 0 and end - offset >= 1 << bits:
            first = offset >> bits
        if not ahead.units and ahead.far < first:
            ahead.far = first
        last = min(end + ahead.window - 1, size - 1) >> bits
        if ahead.far <= last:
            file.ahead.add(ahead)
        if ahead.far <= last and self._chunks.short.on:
            self._chunks.short.want_ahead(
                file, (last << bits >> file.chunk_bits) + 1, size - 1 >> file.chunk_bits
            )
        while ahead.far <= last:
            unit = ahead.far
            start = unit << bits
            count = min(1 << bits, size - start) + 4095 & -4096
            if self.ahead_bytes + count > self._options.read_ahead_bytes_max:
                break
            future = self._chunks.read(file, start >> file.chunk_bits, start & file.chunk_mask, count)
            future.add_done_callback(_seen)
            ahead.units[unit] = ReadAheadUnit(future, count, now_s, min(start + (1 << bits), size))
            self.ahead_bytes += count
            self.counters["ahead_bytes"] += count
            ahead.far += 1
        behind = (end >> bits) - 1  # one unit behind is kept, for requests that were overtaken
        for unit in [u for u in ahead.units if u < behind]:
            self.ahead_bytes -= ahead.units.pop(unit).bytes
        return True

    async def _from_units(
        self, file: OpenInode, ahead: ReadAheadState, offset: int, end: int
    ) -> memoryview | None:
        bits = min(file.chunk_bits, _UNIT_BITS_MAX)
        first, last = offset >> bits, end - 1 >> bits
        units = []
        oldest_s = self._clock.boottime_s() - _UNIT_LIFE_S
        for number in range(first, last + 1):
            unit = ahead.units.get(number)
            if unit is None:
                return None
            if (unit.born_s < oldest_s and unit.future.done()) or unit.end < min(end, number + 1 << bits):
                self.forget(file, ahead)  # too old, or the file grew behind the fetched bytes
                return None
            units.append(unit)
        try:
            for unit in units:
                if not unit.future.done():
                    await asyncio.shield(unit.future)
            parts = [unit.future.result() for unit in units]
        except (NvpoolError, asyncio.CancelledError):
            if any(
                unit.future.done() and (unit.future.cancelled() or unit.future.exception()) for unit in units
            ):
                self.forget(file, ahead)
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                return None  # the plain read follows and reports its own errors
            raise
        self.counters["ahead_hits"] += 1
        start = first << bits
        if first == last:
            return parts[0][offset - start : end - start]
        whole = bytearray(end - offset)
        view = memoryview(whole)
        for number, part in enumerate(parts):
            begin = start + (number << bits)
            a, b = max(offset, begin), min(end, begin + (1 << bits))
            view[a - offset : b - offset] = part[a - begin : b - begin]
        return view

    def forget(self, file: OpenInode, ahead: ReadAheadState) -> None:
        """Drop the handle's read-ahead; the handle starts again as a random reader."""
        for unit in ahead.units.values():
            self.ahead_bytes -= unit.bytes
        ahead.units.clear()
        ahead.run = ahead.reads = ahead.window = ahead.far = 0
        ahead.next = -1
        file.ahead.discard(ahead)

    def changed(self, file: OpenInode) -> None:
        """Drop all fetched bytes of the file, because it is written, truncated or locked here."""
        file.fetching = None
        self.contents.forget(file.inode)
        for ahead in list(file.ahead):
            place = ahead.next
            self.forget(file, ahead)
            ahead.next = place

    @property
    def kept_count(self) -> int:
        """Reads that were answered from cached small files."""
        return self.contents.counters["small_hits"]

    async def read_many(self, reads, into: memoryview) -> None:
        """Read each (open inode, offset, length, place in `into`); all lie within their files.

        See ReadBatcher.read_many.
        """
        for file in {id(read[0]): read[0] for read in reads}.values():
            if file.written is not None and (file.written.dirty or file.written.sending):
                await self._writer.store(file)
        await self._batches.read_many(reads, into)


def _settle(future: asyncio.Future, found: memoryview | bytes | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)


def _seen(future: asyncio.Future) -> None:
    """Retrieve the error of a read-ahead unit that no read has used. A later read reports its own error."""
    if not future.cancelled():
        future.exception()


def _covers(laid: list, start: int, end: int) -> bool:
    for first, last, _ in sorted(laid, key=lambda piece: piece[0]):
        if first > start:
            return False
        start = max(start, last)
    return start >= end
