"""Writeback: buffers the writes of applications until the stores have them.

Bytes are kept until a store has them or the deadline has passed. Then the error is reported once, at the next
write, fsync or close of the file, and is not forgotten before. Of two writes to the same blocks, the later
one is sent after the earlier one has ended, so merges of partial blocks are never lost. The size reported to
the metadata service is the end of the stored bytes; it never covers an older write that is not stored yet.
Memory is bounded over all files; writers wait for buffer space.

Bytes gather in extents (class `DirtyExtent`) within units of at most 1 MiB that never cross a chunk. An extent
that reaches its unit's end is sent immediately, and so are the first bytes of a new file. Other extents are
sent when the file is flushed, after a second, or when memory is short. Used by vfs and the reader; this
module never reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from nvpool.client.data.unstable_writes import Stored
from nvpool.client.rpc.slot_journal import asking
from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.dirty_file import DirtyExtent, DirtyFile, Record, copies, kept
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.write.append_reservations import PUBLISH_S, AppendReservation, open_end
from nvpool.client.write.crash_journal import CrashJournal, JournaledFile
from nvpool.client.write.sender import BeginReport, WriteSender, withdrawn
from nvpool.core.clock import Clock
from nvpool.core.errors import DeadlineExceeded, LockLost, NvpoolError, StaleCut, WritesLost
from nvpool.core.grants import WRITE
from nvpool.core.units import BLOCK_BYTES, KIB

log = logging.getLogger(__name__)

_LAST = 1 << 62
"""Greater than the number of any extent."""
_TAIL_BYTES = 256 * KIB
"""Small writes grow one buffer up to this size: growing larger buffers would copy too much."""
_BLOCK, _TAIL = BLOCK_BYTES, _TAIL_BYTES


class Writer(WriteSender):
    """The writeback buffer of a client.

    `refresh(file, rights)` fetches new attributes and a grant. `report(file, end, bytes, wrote, sync)`
    reports to the service and caches the attributes of the reply. `begin_report` is that of WriteReports.
    """

    def __init__(
        self,
        chunks,
        options: ClientOptions,
        clock: Clock,
        events: ClientEvents,
        *,
        refresh: Callable[[OpenInode, int], Awaitable[None]],
        report: Callable[[OpenInode, int, int, bool, bool], Awaitable[None]],
        begin_report: BeginReport = lambda *_: None,
        keeping: CrashJournal | None = None,
    ):
        super().__init__(chunks, options, clock, refresh, begin_report, keeping, self._was_lost)
        self._report = report
        self._held_max = options.write_buffer_bytes
        self.files: dict[int, DirtyFile] = {}
        events.file_truncated.append(self.was_cut)

    # -- writing -------------------------------------------------------------------------------------------------------

    async def write(self, file: OpenInode, offset: int, buffer) -> int:
        """Accept `buffer` as the bytes of the file from `offset` on; return its length.

        The caller may reuse the buffer on return. Raises the error of an earlier write of the file, once.
        Waits only for buffer space: DeadlineExceeded if there is none in time; then nothing of this write is
        kept.
        """
        written = file.written
        if written is None:
            written = self._written(file)
        if written.error is not None:
            raise self.take_error(written)
        length = len(buffer)
        if not self._has_room(length):
            await self._wait_for_room(length)
        self._put(written, offset, buffer if type(buffer) is bytes else memoryview(buffer), asking())
        return length

    def write_now(self, file: OpenInode, offset: int, buffer, unique: int = 0) -> bool:
        """As `write`, without waiting; return whether `buffer` was accepted.

        False: the caller must await `write`. `unique`: the number of the kernel's request.
        """
        written = file.written or self._written(file)
        if written.error is not None or not self._has_room(len(buffer)):
            return False
        self._put(written, offset, buffer, unique)
        return True

    def _has_room(self, length: int) -> bool:
        if self.held and self.held + length > self._held_max:
            return False
        return self.keeping is None or self.keeping.has_room(length)

    def _written(self, file: OpenInode) -> DirtyFile:
        written = DirtyFile(file)
        if self.keeping is not None:
            self.keeping.begin(written)
        file.written = written
        self.files[file.inode] = written
        return written

    def take_over(self, file: OpenInode, left: JournaledFile) -> None:
        """Continue with the unstored writes that the previous process left for this open file."""
        written = file.written = DirtyFile(file)
        self.files[file.inode] = written
        written.entry = left.entry
        if left.entry < 0:
            self.keeping.begin(written)
        # it is not known which open files have reported the error, so all of them report it
        if left.error or left.met:
            written.met = WritesLost(
                "bytes written earlier could not be stored, as the process before this one has met"
            )
            written.error = written.met if left.error else None
        written.wrote = written.begun = True
        written.wrote_s = self._clock.boottime_s()
        if file.truncated <= left.cut:
            written.stored_bytes = left.stored_bytes
            if left.pieces:
                written.ahead = ((_LAST, left.stored_end),) if left.stored_end else ()
            else:
                written.stored_end = left.stored_end
        for piece in left.pieces:
            self._put_unit(
                written,
                piece.offset >> written.unit_bits,
                piece.offset,
                piece.data,
                written.wrote_s,
                piece.record,
            )
        written.find_end()
        self.keeping.note(written)
        self.mark_all_due(written)
        self.pump(written)

    def flushes_all(self, is_unknown: bool) -> None:
        """Record whether stores may have unstable writes of any inode from the previous process."""
        self.unstable.unknown = is_unknown

    def meet(self, file: OpenInode, error: NvpoolError) -> DirtyFile:
        """Record that bytes written to this open file are lost.

        Each handle of the file reports the error, also in a successor process.
        """
        written = file.written or self._written(file)
        written.meet(error)
        self._note(written)
        return written

    def _was_lost(self, inode: int) -> None:
        """Handle the loss of unstable writes: stores have lost bytes before they were durable."""
        written = self.files.get(inode)
        log.error("inode %d: %s", inode, WritesLost())
        if written is not None:
            self.meet(written.file, WritesLost())

    def _put(self, written: DirtyFile, offset: int, data, unique: int = 0) -> None:
        length = len(data)
        if not length:
            return
        now_s = self._now_s()
        if not written.wrote:
            written.wrote = True
            written.wrote_s = now_s
        bits = written.unit_bits
        end = offset + length
        if end > written.end:
            written.end = end
        # The first bytes of a file are sent while the application is still busy with its next call: most
        # files are small and are closed immediately after. A longer file costs one more message. Less than a
        # block would have to be merged.
        begins = not offset and _BLOCK <= length <= _TAIL and not written.begun and not written.file.attr.size
        written.begun = True
        if (
            begins
            and not (written.dirty or written.sending or written.paused or self.stalled or end > 1 << bits)
            and self._has_flight_room(length)
        ):
            self._begin_with(written, end, data, now_s, unique)
            return
        ready = False
        keeping, record = self.keeping, None
        if (end - 1) >> bits == offset >> bits:
            if keeping is not None:
                record, data = keeping.keep(written, offset, data, unique, True)
            ready = self._put_unit(written, offset >> bits, offset, data, now_s, record)
            if begins:
                ready = written.dirty[offset >> bits][0].due = True
        else:
            view = memoryview(data)
            place = offset
            while place < end:
                border = min((place >> bits) + 1 << bits, end)
                part = view[place - offset : border - offset]
                if keeping is not None:
                    record, part = keeping.keep(written, place, part, unique, border == end)
                ready = self._put_unit(written, place >> bits, place, part, now_s, record) or ready
                place = border
        if ready:
            self.pump(written)

    def _begin_with(self, written: DirtyFile, end: int, data, now_s: float, unique: int) -> None:
        """Send the first bytes of a new file, in one unit, as `_put` and `pump` would.

        The caller has made sure that they may be sent.
        """
        segment = DirtyExtent.__new__(DirtyExtent)
        if self.keeping is not None:
            record, data = self.keeping.keep(written, 0, data, unique, True)
            segment.records = [record]
            segment.parts = [data]  # the journal's memory: an extent in flight does not grow
        else:
            segment.records = []
            segment.parts = [kept(data)]
        self._hold(written, end)
        self.last_number += 1
        segment.start, segment.end, segment.number = 0, end, self.last_number
        segment.born_s, segment.due = now_s, True
        self._set_out(written, 0, segment)

    def _put_unit(
        self, written: DirtyFile, unit: int, start: int, data, now_s: float, record: Record | None
    ) -> bool:
        """Add bytes to the dirty extents of a unit. Return whether an extent is ready to be sent."""
        length = len(data)
        end = start + length
        segments = written.dirty.get(unit)
        if segments is None:
            segments = written.dirty[unit] = []
        last = segments[-1] if segments else None
        if last is not None and last.end == start:
            self._hold(written, length)
            tail = last.parts[-1]
            if type(tail) is bytearray and len(tail) + length <= _TAIL_BYTES:
                tail += data
            else:
                last.parts.append(kept(data, record is not None))
            last.end = end
            segment = last
        elif last is None or start > last.end:
            self._hold(written, length)
            self.last_number += 1
            segment = DirtyExtent(start, end, [kept(data, record is not None)], self.last_number, now_s)
            segments.append(segment)
        else:
            segment = self._merge(written, segments, start, end, data, now_s)
        if record is not None:
            segment.records.append(record)
        if end & (1 << written.unit_bits) - 1 == 0:
            segment.due = True
        return segment.due

    def _merge(
        self, written: DirtyFile, segments: list[DirtyExtent], start: int, end: int, data, now_s: float
    ) -> DirtyExtent:
        """Overlay the extents with `data`; the extents that it touches become one.

        The merged extent takes the place of the oldest one in the order of writes.
        """
        touched = [s for s in segments if s.start <= end and s.end >= start]
        if len(touched) == 1 and touched[0].start <= start and touched[0].end >= end:
            segment = touched[0]
            segment.bytes()[start - segment.start : end - segment.start] = data
            return segment
        first = min(start, min([s.start for s in touched], default=start))
        last = max(end, max([s.end for s in touched], default=end))
        whole = bytearray(last - first)
        for old in touched:
            whole[old.start - first : old.end - first] = old.bytes()
        whole[start - first : end - first] = data
        self.last_number += 1
        segment = DirtyExtent(
            first,
            last,
            [whole],
            min(self.last_number, min([s.number for s in touched], default=self.last_number)),
            min(now_s, min([s.born_s for s in touched], default=now_s)),
        )
        segment.due = any(s.due for s in touched)
        segment.records = sorted(record for s in touched for record in s.records)
        self._hold(written, len(whole) - sum(s.end - s.start for s in touched))
        rest = [s for s in segments if s not in touched]
        segments[:] = sorted([*rest, segment], key=lambda s: s.start)
        return segment

    async def _wait_for_room(self, length: int) -> None:
        deadline_s = self._clock.boottime_s() + self._options.deadline_s
        while self.held and not self._has_room(length):
            for written in list(self.files.values()):
                self.mark_all_due(written)
                self.pump(written)
            if not self.held or self._has_room(length):
                return
            future = asyncio.get_running_loop().create_future()
            self.room_waiters.append(future)
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                    await future
            except TimeoutError:
                raise DeadlineExceeded(
                    "the stores took none of what was written", may_be_applied=False
                ) from None

    # -- flushing ------------------------------------------------------------------------------------------------------

    async def store(self, file: OpenInode) -> None:
        """Wait until each byte written before the call is stored or has failed.

        Does not raise the errors of writes; they are kept, see `take_error`.
        """
        written = file.written
        if written is None:
            return
        number = self.last_number
        while True:
            waits = False
            for segment in written.segments():
                if segment.number <= number:
                    segment.due = waits = True
            if not waits:
                return
            self.pump(written)
            if written.changed is None or written.changed.done():
                written.changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(written.changed)

    async def settle(self, file: OpenInode, *, sync: bool = False) -> None:
        """Report size and time of the stored bytes to the service; with `sync` durably.

        Raises the errors of the service; the unreported data is then kept for the next attempt.
        """
        written = file.written
        if written is None:
            if sync:
                await self._report(file, 0, 0, False, True)
            return
        async with written.reporting:
            while True:
                if not (written.wrote or written.stored_end or sync or withdrawn(written)):
                    return
                sizes = self.take_report(written)
                try:
                    report = partial(self._report, file, sizes.end, sizes.stored, sizes.wrote, sync)
                    await (report(sizes.withdrawn) if sizes.withdrawn else report())
                except BaseException as error:
                    self.report_failed(written, sizes, error)
                    if not isinstance(error, StaleCut):
                        raise
                    await self._refresh(file, WRITE)
                    if file.cut == sizes.cut:
                        raise
                else:
                    self.report_succeeded(written, sizes)
                    return

    def raise_error(self, file: OpenInode) -> None:
        """Raise the file's kept error, if there is one, once."""
        if file.written is not None and file.written.error is not None:
            raise self.take_error(file.written)

    @property
    def busy(self) -> bool:
        """Whether there are any written files here, or unstable writes at stores."""
        return bool(self.files or self.unstable)

    def has_unstable_writes(self, inode: int) -> bool:
        """Whether stores have unstable writes of the inode that this client has sent."""
        return inode in self.unstable

    async def make_durable(self, inode: int) -> None:
        """Make the inode's stored bytes durable: on return they survive a power loss. WritesLost, once."""
        await self.unstable.flush(inode)

    # -- truncation ----------------------------------------------------------------------------------------------------

    async def begin_cut(self, file: OpenInode, size: int) -> None:
        """Prepare for a truncation to `size` by the service.

        Drops the bytes behind `size`, waits for the writes in flight, and sends nothing until `end_cut`. The
        remaining bytes are sent after it, with the new truncate number.
        """
        file.delegation = None  # the shard has the size that it sets
        written = file.written
        if written is None:
            return
        self._clip(written, size)
        await self.pause(file)
        written.stored_end = min(written.stored_end, size)
        written.ahead = tuple([(number, min(end, size)) for number, end in written.ahead])
        if written.appended is not None:
            written.appended.close()  # the truncation closes it: the rest of it lies before the file's end
        written.find_end()
        self._note(written)

    async def pause(self, file: OpenInode) -> None:
        """Wait for the writes in flight, and send nothing until `end_cut`."""
        written = file.written
        if written is None:
            return
        written.paused += 1
        try:
            while written.sending:
                if written.changed is None or written.changed.done():
                    written.changed = asyncio.get_running_loop().create_future()
                await asyncio.shield(written.changed)
        except BaseException:
            self.end_cut(file)
            raise

    def end_cut(self, file: OpenInode) -> None:
        written = file.written
        if written is not None and written.paused:
            written.paused -= 1
            self.pump(written)

    def was_cut(self, file: OpenInode) -> None:
        """Adjust the local bytes after a truncation of the file, by this client or by others.

        Appends that another client truncated are gone, as if they had been stored before; all other local
        bytes count as written after the truncation.
        """
        written = file.written
        appended = written.appended
        if appended is not None and appended.end > file.attr.size:
            appended.void.update(
                segment.number
                for segments in written.sending.values()
                for segment in segments
                if segment.end > appended.start
            )
            self._clip(written, appended.start)
            appended.close()
        written.was_cut()

    # -- appends -------------------------------------------------------------------------------------------------------

    def appended(self, file: OpenInode) -> AppendReservation:
        """The state of appends to the file."""
        written = file.written or self._written(file)
        if written.appended is None:
            written.appended = AppendReservation()
        return written.appended

    def withdraw(self, file: OpenInode, place: int, doubtful: bool = False) -> None:
        """Withdraw the reservation of an append from `place` on, because it is not used.

        `doubtful`: the service may have made the reservation, or may not. Bytes that other writers on this
        client have written behind `place` are dropped too, and their writers get an error.
        """
        appended = self.appended(file)
        if file.written.end > place:
            self.meet(file, WritesLost())
        appended.doubtful = appended.doubtful or doubtful
        self._give_up(file.written, place)
        self.publish(file)

    def publish(self, file: OpenInode) -> None:
        """Start to send and report the appended bytes."""
        written = file.written
        if not written.appended.publishing:
            written.appended.publishing = True
            self._own(self._publish(file, written))

    async def _publish(self, file: OpenInode, written: DirtyFile) -> None:
        appended = written.appended
        try:
            while file.written is written and written.unsettled and (open_end(written) or written.is_broken):
                if not (appended.shared or appended.broken is not None):
                    await asyncio.sleep(PUBLISH_S)
                await self.store(file)
                await self.settle(file)
        except NvpoolError:
            pass  # the data is kept, and reported again with the next flush or in a second
        finally:
            appended.publishing = False

    # -- bytes that the stores copied by themselves --------------------------------------------------------------------

    def was_copied(
        self, file: OpenInode, end: int, byte_count: int, cut: int, stored: Stored | None = None
    ) -> None:
        """Record `byte_count` bytes up to `end` that a store copied under truncate number `cut`.

        `stored`: the unstable write to commit; None for a hole.
        """
        written = file.written or self._written(file)
        written.begun = True
        if not written.wrote:
            written.wrote = True
            written.wrote_s = self._clock.boottime_s()
        if file.truncated <= cut:
            written.stored_end = max(written.stored_end, end)
            written.stored_bytes += byte_count
            written.find_end()
        self._note(written)
        if stored is not None:
            self.unstable.note(file.inode, stored)

    # -- reads of local bytes ------------------------------------------------------------------------------------------

    @staticmethod
    def overlay(file: OpenInode, start: int, end: int) -> list[tuple[int, int, bytes]]:
        """Copies of the local bytes in [start, end), in the order of overlaying the stored bytes."""
        return copies(file.written, start, end)

    # -- background ------------------------------------------------------------------------------------------------------

    async def run_once(self) -> None:
        """Send and report all data older than `write_age_s`, and forget files that are closed and clean."""
        oldest_s = self._clock.boottime_s() - self._options.write_age_s
        for written in list(self.files.values()):
            file = written.file
            for segments in written.dirty.values():
                for segment in segments:
                    if segment.born_s <= oldest_s:
                        segment.due = True
            if written.dirty:
                self.pump(written)
            if (
                written.stored_end or (written.wrote and written.wrote_s <= oldest_s) or written.is_broken
            ) and not written.reporting.taken:
                self._own(self._settle_quietly(file))
            elif written.clean and not file.handles:
                self._drop(written)
                if file.written is written:
                    file.written = None

    async def _settle_quietly(self, file: OpenInode) -> None:
        try:
            await self.settle(file)
        except NvpoolError:
            pass  # the data is kept, and reported again with the next flush or in a second

    def forget(self, file: OpenInode) -> None:
        """Drop all data of the file after its last handle was closed, stored or not."""
        written = self.files.get(file.inode)
        if written is not None and written is file.written:
            self._drop(written)
            freed = sum(s.end - s.start for segments in written.dirty.values() for s in segments)
            written.dirty.clear()
            self._hold(written, -freed)
            self._wake_waiters(written)

    def _drop(self, written: DirtyFile) -> None:
        del self.files[written.file.inode]
        if self.keeping is not None:
            self.keeping.end(written)

    def lose(self, file: OpenInode) -> None:
        """Drop all unstored and unreported data of the file, because its locks were lost.

        None of it may be sent any more. Each handle of the file gets LockLost.
        """
        written = file.written
        if written is None:
            return
        if not written.clean:
            written.meet(LockLost())
        written.stored_end, written.stored_bytes, written.wrote, written.ahead = 0, 0, False, ()
        self.forget(file)
        written.find_end()

    async def close(self, deadline_s: float) -> bool:
        """Send and report all data, as far as possible by `deadline_s`; then stop.

        Return whether all was sent.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                for written in list(self.files.values()):
                    await self.store(written.file)
                    await self._settle_quietly(written.file)
        except TimeoutError:
            pass
        sent = not self.held
        for writing in list(self.begun):
            writing.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1.0)
        return sent

    def held_bytes(self) -> int:
        return self.held
