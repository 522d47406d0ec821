"""Sender of dirty extents to the stores, and of reports to the metadata service. It is a part of `writeback`.

The fast path is the common case: the head of the chunk's chain is connected, and the service has a free
slot. Then the extent is sent where the write is accepted; its reply triggers the report, if a flush waits
only for that; the report's reply completes the flush. No task is created, and no event-loop iteration lies
between these steps.

In every other case the slow path is used (`_send`, `Writer.settle`). Only the slow path retries and reports
errors; a request that the fast path has submitted continues there under the same request id (slot and
sequence).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nvpool.client.data.unstable_writes import UnstableWrites
from nvpool.client.data.write_fast_path import SubmittedWrite, WriteSubmitter
from nvpool.client.rpc.change_fast_path import OnEnd, SubmittedChange
from nvpool.client.state.dirty_file import JOURNAL_VIEW_MIN, DirtyExtent, DirtyFile, prepared
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.write.append_reservations import open_end
from nvpool.client.write.crash_journal import CrashJournal
from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.errors import Cancelled, LockLost, NotFound, NvpoolError, StaleCut
from nvpool.core.grants import WRITE
from nvpool.core.units import BLOCK_BYTES, WITHDRAW_ANY

log = logging.getLogger(__name__)
_BLOCK = BLOCK_BYTES

BeginReport = Callable[[OpenInode, int, int, bool, OnEnd], SubmittedChange | None]
"""Submits a report: (file, end, bytes that stores have, whether the file was written, on_end).

`on_end` is called before the attributes of the service's reply are cached.
"""


class SizeReport:
    """The content of a report to the service."""

    __slots__ = ("end", "stored", "wrote", "cut", "withdrawn")

    def __init__(self, end: int, stored: int, wrote: bool, cut: int, withdrawn: int) -> None:
        self.end = end
        self.stored = stored
        self.wrote = wrote
        self.cut = cut
        self.withdrawn = withdrawn


class SentExtent(SubmittedWrite):
    """A submitted write of an extent."""

    __slots__ = ("sender", "written", "unit", "extent")

    def ended(self, error: BaseException | None) -> None:
        """Pass the end on to the sender."""
        self.sender.was_sent(self, error)


class WriteSender:
    """The part of `Writer` that sends."""

    def __init__(
        self,
        chunks: Any,
        options: ClientOptions,
        clock: Clock,
        refresh: Callable[[OpenInode, int], Awaitable[None]],
        begin_report: BeginReport,
        keeping: CrashJournal | None,
        lost: Callable[[int], None],
    ) -> None:
        """`lost(inode)` is called when stores have lost unstable writes."""
        self._chunks = chunks
        self._submitter: WriteSubmitter | None = chunks.submitter
        self._options = options
        self._flight_max, self._deadline_after_s = options.write_flight_bytes, options.deadline_s
        self._clock = clock
        self._is_system = type(clock) is SystemClock
        self._refresh = refresh
        self.begin_report = begin_report
        self.keeping = keeping
        self.held = 0
        self.in_flight = 0
        self.last_number = 0
        self.room_waiters: list[asyncio.Future] = []
        # files that wait for space in flight, in order
        self.stalled: OrderedDict[int, DirtyFile] = OrderedDict()
        self._tasks: set[asyncio.Task] = set()
        self.begun: set[SubmittedWrite] = set()
        self.unstable = UnstableWrites(
            chunks, keeping.note_unstable if keeping is not None else lambda there_is: None, lost
        )

    def _now_s(self) -> float:
        return primitives.boottime_s() if self._is_system else self._clock.boottime_s()

    def _own(self, work: Coroutine) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def mark_all_due(self, written: DirtyFile) -> None:
        """Let `pump` send all dirty extents of the file, however young they are."""
        for segments in written.dirty.values():
            for segment in segments:
                segment.due = True

    def pump(self, written: DirtyFile) -> None:
        """Send due extents that share no block with one in flight, within the bound of bytes in flight."""
        if written.paused:
            return
        for unit, segments in list(written.dirty.items()):
            kept = []
            for segment in segments:
                if not segment.due or self._overlaps_sending(written, unit, segment):
                    kept.append(segment)
                elif not self._has_flight_room(segment.end - segment.start):
                    kept.append(segment)
                    self.stalled[written.file.inode] = written
                else:
                    self._set_out(written, unit, segment)
            if kept:
                written.dirty[unit] = kept
            else:
                del written.dirty[unit]

    def _has_flight_room(self, length: int) -> bool:
        """Whether the bound of bytes in flight lets `length` more be sent."""
        return not self.in_flight or self.in_flight + length <= self._flight_max

    def _set_out(self, written: DirtyFile, unit: int, segment: DirtyExtent) -> None:
        self.in_flight += segment.end - segment.start
        sending = written.sending.get(unit)
        if sending is None:
            written.sending[unit] = [segment]
        else:
            sending.append(segment)
        if not self._begin(written, unit, segment):
            self._own(self._send(written, unit, segment))

    def _overlaps_sending(self, written: DirtyFile, unit: int, segment: DirtyExtent) -> bool:
        sending = written.sending.get(unit)
        if sending is None:
            return False
        first, last = segment.start // _BLOCK, (segment.end - 1) // _BLOCK
        overlaps = False
        for sent in sending:
            overlaps = overlaps or (sent.start // _BLOCK <= last and (sent.end - 1) // _BLOCK >= first)
        return overlaps

    def _deadline_s(self, segment: DirtyExtent, now_s: float) -> float:
        """The deadline, counted from the write. A write that waited behind others does not get more time."""
        after_s = self._deadline_after_s
        return max(segment.born_s + after_s, now_s + min(1.0, after_s))

    def _begin(self, written: DirtyFile, unit: int, segment: DirtyExtent) -> bool:
        """Submit the extent without a task; return whether it was submitted."""
        submitter = self._submitter
        if submitter is None:
            return False
        writing = SentExtent.__new__(SentExtent)
        writing.sender, writing.written, writing.unit, writing.extent = self, written, unit, segment
        now_s = self._now_s()
        if not submitter.begin(writing, written.file, segment, self._deadline_s(segment, now_s), now_s):
            return False
        self.begun.add(writing)
        return True

    def was_sent(self, writing: SentExtent, error: BaseException | None) -> None:
        """Complete a submitted write, or retry it on the slow path if it failed."""
        self.begun.discard(writing)
        written, unit, segment = writing.written, writing.unit, writing.extent
        if isinstance(error, asyncio.CancelledError):
            written.meet(_closed())
        elif error is not None:
            self._own(self._send(written, unit, segment, writing))
            return
        elif written.file.lost:
            self._dropped(written, segment, LockLost())
        else:
            self._has_stored(written, segment, writing.cut)
        self._left(written, unit, segment, None if error is not None else writing)

    async def _send(
        self, written: DirtyFile, unit: int, segment: DirtyExtent, begun: SubmittedWrite | None = None
    ) -> None:
        """Send the extent by the slow path. `begun`: its earlier submission, which failed."""
        file = written.file
        try:
            if segment.records and segment.end - segment.start < JOURNAL_VIEW_MIN:
                # A connection may keep parts beyond the end of a request; memory of the journal is used again.
                segment.bytes()
            parts, checksums = prepared(segment)
            deadline_s = self._deadline_s(segment, self._now_s())
            offset = segment.start & file.chunk_mask
            index = segment.start >> file.chunk_bits
            while True:
                cut = file.cut
                try:
                    named = {} if begun is None else {"begun": begun}
                    begun = None
                    stored = await self._chunks.write(
                        file,
                        index,
                        offset,
                        segment.end - segment.start,
                        parts,
                        checksums,
                        deadline_s,
                        **named,
                    )
                    break
                except StaleCut:
                    # Another client has truncated the file since. It never saw our bytes, so they come after
                    # the truncation.
                    if self._clock.boottime_s() > deadline_s:
                        raise
                    await self._refresh(file, WRITE)
                    if written.appended is not None and segment.number in written.appended.void:
                        return  # appended before the truncation, and truncated with the file
                    if file.cut == cut:
                        await asyncio.sleep(self._options.retry_first_s)
            if file.lost:
                raise LockLost()
            self._has_stored(written, segment, stored.cut)
            self.unstable.note(file.inode, stored)
        except NvpoolError as error:
            self._dropped(written, segment, error)
        except asyncio.CancelledError:
            written.meet(_closed())
            raise
        finally:
            self._left(written, unit, segment, None)

    def _has_stored(self, written: DirtyFile, segment: DirtyExtent, cut: int) -> None:
        """Record that a store has the extent, written under the truncate number `cut`."""
        if written.file.truncated <= cut:
            end = segment.end
            if written.appended is not None and written.is_broken:
                end = min(end, written.appended.broken)
            written.has_stored(segment, end)
            written.stored_bytes += segment.end - segment.start
        # The service may have set the time before these bytes were stored: a client that opened the file
        # since has cached the old bytes, and only a new time reveals that.
        written.wrote = True
        if self.keeping is not None:
            self._note(written)

    def _dropped(self, written: DirtyFile, segment: DirtyExtent, error: NvpoolError) -> None:
        log.error(
            "%d bytes at %d of inode %d could not be stored and are dropped: %s",
            segment.end - segment.start,
            segment.start,
            written.file.inode,
            error,
        )
        written.meet(error)
        appended = written.appended
        if appended is not None and segment.end > appended.start and segment.start < open_end(written):
            self._give_up(written, max(segment.start, appended.start))

    def _left(
        self, written: DirtyFile, unit: int, segment: DirtyExtent, stored: SubmittedWrite | None
    ) -> None:
        """Remove the extent from those in flight: it was stored (`stored`, or noted before) or dropped."""
        length = segment.end - segment.start
        self.in_flight -= length
        sending = written.sending[unit]
        sending.remove(segment)
        if not sending:
            del written.sending[unit]
        if written.ahead:
            written.catch_up()
        if written.appended is not None and written.appended.void:
            written.appended.void.discard(segment.number)
            written.find_end()
        flushing: CloseFlush | None = written.flushing
        if flushing is not None:
            flushing.look()  # first, so the service works on the report while we continue
        # before the pieces are dropped: a successor process must know that the bytes are unstable
        if stored is not None:
            stored.note_stored(self.unstable)
        if self.keeping is not None:
            self.keeping.drop(segment.records)
        self._hold(written, -length)
        if written.error is not None:
            written.find_end()
            self._note(written)
        if written.changed is not None:
            self._wake_waiters(written)
        if written.dirty:
            self.pump(written)
        if self.stalled:
            self._pump_stalled()

    def _pump_stalled(self) -> None:
        # once around: a file without space waits for the next completed send
        for _ in range(len(self.stalled)):
            if self.in_flight >= self._flight_max:
                break
            self.pump(self.stalled.popitem(last=False)[1])

    def _hold(self, written: DirtyFile, count: int) -> None:
        written.held += count
        self.held += count
        if count < 0 and self.room_waiters:
            self._make_room()

    def _make_room(self) -> None:
        waiting, self.room_waiters = self.room_waiters, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _clip(self, written: DirtyFile, size: int) -> None:
        """Drop the dirty bytes behind `size`."""
        freed = 0
        for unit, segments in list(written.dirty.items()):
            kept = []
            for segment in segments:
                if self.keeping is not None and segment.end > size:
                    self.keeping.clip(segment, size)
                if segment.start >= size:
                    freed += segment.end - segment.start
                    continue
                if segment.end > size:
                    freed += segment.end - size
                    del segment.bytes()[size - segment.start :]
                    segment.end = size
                kept.append(segment)
            if kept:
                written.dirty[unit] = kept
            else:
                del written.dirty[unit]
        written.find_end()
        self._hold(written, -freed)
        if freed:
            self._wake_waiters(written)

    def _give_up(self, written: DirtyFile, place: int) -> None:
        """Give up all appended bytes from `place` on, because some cannot be stored or accepted."""
        appended = written.appended
        if appended.broken is not None:
            place = min(place, appended.broken)
        appended.broken = place
        self._clip(written, place)
        written.ahead = tuple([(number, min(end, place)) for number, end in written.ahead])
        written.find_end()

    def take_error(self, written: DirtyFile) -> NvpoolError:
        """Return the kept error and forget it; the caller raises the error to an application."""
        error, written.error = written.error, None
        self._note(written)
        return error

    def _note(self, written: DirtyFile) -> None:
        if written.entry >= 0:
            self.keeping.note(written)

    def _wake_waiters(self, written: DirtyFile) -> None:
        """Wake the callers that wait for extents to end: one was stored, dropped or truncated."""
        flushing: CloseFlush | None = written.flushing
        if flushing is not None:
            flushing.look()
        if written.changed is not None and not written.changed.done():
            written.changed.set_result(None)

    # -- reports to the service ----------------------------------------------------------------------------------------

    def take_report(self, written: DirtyFile) -> SizeReport:
        """Return the data to report now. From here on it counts as reported; `report_failed` reverses that."""
        sizes = SizeReport.__new__(SizeReport)
        sizes.end, sizes.stored, sizes.wrote = written.stored_end, written.stored_bytes, written.wrote
        sizes.cut = written.file.cut
        sizes.withdrawn = withdrawn(written) if written.appended is not None else 0
        written.wrote = False
        written.stored_bytes = 0
        return sizes

    def report_succeeded(self, written: DirtyFile, sizes: SizeReport) -> None:
        """Record that the service has applied this report."""
        if sizes.withdrawn:
            written.appended.close()
        if written.stored_end <= sizes.end:
            written.stored_end = 0
            written.find_end()
        self._note(written)

    def report_failed(self, written: DirtyFile, sizes: SizeReport, error: BaseException) -> None:
        """Count the data of a failed report as unreported again, unless the file is gone."""
        if isinstance(error, NotFound):
            written.stored_end = 0  # the inode is gone: no client will ever ask for its size
            self._note(written)
            return
        written.wrote = written.wrote or sizes.wrote
        if not isinstance(error, StaleCut):
            written.stored_bytes += sizes.stored

    def begin_flush(
        self, file: OpenInode, on_end: OnEnd, otherwise: Callable[[], Coroutine]
    ) -> CloseFlush | bool | None:
        """As HandleWrites.begin_flush. `otherwise` makes the coroutine of the slow path."""
        written: DirtyFile = file.written
        if (
            written.flushing is not None
            or written.paused
            or written.error is not None
            or written.reporting.taken
            or (written.appended is not None and written.is_broken)
        ):
            return None
        flush = CloseFlush(self, written, self.last_number, on_end, otherwise)
        if written.dirty or written.sending:
            if written.dirty:
                self.mark_all_due(written)
                self.pump(written)
            written.flushing = flush
        elif not written.wrote and not written.stored_end:
            return True
        elif not flush.report():
            return None
        return flush


class CloseFlush:
    """A close(2) in progress: waits for extents up to `number`, then for their report.

    `on_end(None, error)` is called once, before the client updates its state. The object is the `on_end` of its
    report.
    """

    __slots__ = (
        "on_end",
        "_writer",
        "_written",
        "_number",
        "_otherwise",
        "_sizes",
        "submitted_report",
        "_task",
        "_ended",
    )

    def __init__(
        self,
        writer: WriteSender,
        written: DirtyFile,
        number: int,
        on_end: OnEnd,
        otherwise: Callable[[], Coroutine],
    ) -> None:
        self.on_end: OnEnd | None = on_end
        self._writer = writer
        self._written = written
        self._number = number
        self._otherwise: Callable[[], Coroutine] | None = otherwise
        self._sizes: SizeReport | None = None
        self.submitted_report: SubmittedChange | None = None
        self._task: asyncio.Task | None = None
        self._ended = False

    def look(self) -> None:
        """Check for completion; called when an extent has ended."""
        written = self._written
        if self._waits_for(written.sending) or self._waits_for(written.dirty):
            return
        written.flushing = None
        if not self.report():
            self._do_otherwise()

    def _waits_for(self, units: dict[int, list[DirtyExtent]]) -> bool:
        if units:
            for segments in units.values():
                for segment in segments:
                    if segment.number <= self._number:
                        return True
        return False

    def report(self) -> bool:
        """Submit the report; return whether it was submitted. False: there was no side effect."""
        writer, written = self._writer, self._written
        if (
            written.error is not None
            or (written.appended is not None and written.is_broken)
            or written.paused
            or not (written.wrote or written.stored_end)
            or not written.reporting.take()
        ):
            return False
        sizes = writer.take_report(written)
        report = writer.begin_report(written.file, sizes.end, sizes.stored, sizes.wrote, self)
        if report is None:
            written.wrote, written.stored_bytes = sizes.wrote, sizes.stored
            written.reporting.release()
            return False
        self._sizes, self.submitted_report = sizes, report
        return True

    def __call__(self, _: Any, error: BaseException | None) -> None:
        """Handle the end of the report."""
        writer, written, sizes = self._writer, self._written, self._sizes
        self.submitted_report = None
        if error is None:
            self._end(writer.take_error(written) if written.error is not None else None)
            writer.report_succeeded(written, sizes)
            written.reporting.release()
            return
        writer.report_failed(written, sizes, error)
        written.reporting.release()
        if isinstance(error, StaleCut | NotFound):
            self._do_otherwise()
        else:
            self._end(error)

    def _do_otherwise(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._otherwise())
        self._task.add_done_callback(self._was_done_otherwise)

    def _was_done_otherwise(self, task: asyncio.Task) -> None:
        self._end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def cancel(self) -> bool:
        """Call the listener with CancelledError; requests in flight continue.

        False: the flush has ended already.
        """
        if self._ended:
            return False
        if self._task is not None:
            return self._task.cancel()
        if self.submitted_report is not None:
            return self.submitted_report.cancel()
        self._written.flushing = None
        self._end(asyncio.CancelledError())
        return True

    def _end(self, error: BaseException | None) -> None:
        self._ended = True
        on_end = self.on_end
        self.on_end = self._otherwise = None  # they refer to this object: so it goes without the collector
        on_end(None, error)


def withdrawn(written: DirtyFile) -> int:
    """The value of ReportRequest.withdrawn: end of a reservation to withdraw; 0: none can be withdrawn now.

    A reservation can be withdrawn when none of its bytes is in flight any more.
    """
    if not written.is_broken:
        return 0
    appended = written.appended
    if any(segment.end > appended.broken for segment in written.segments()):
        return 0
    # an end of 0: a truncation has closed the reservation meanwhile
    return WITHDRAW_ANY if appended.doubtful or not appended.end else appended.end


def _closed() -> Cancelled:
    return Cancelled("the client was closed before the bytes were stored")
