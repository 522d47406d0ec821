"""The commonest reads of a mount in one compiled step: from the kernel's request to the answer.

Of a read at random by the short cut (client/data/short_circuit) the work is two dozen small decisions, a preadv and a writev;
in Python, with a call for each layer, the decisions are half of the processor time. Here they are made together where a
compiler was (`_plainreads`); its twin is the way of every request (kernel_requests to client/data/short_circuit), which says
the same.

Only plain sailing: up to 128 KiB of one chunk whose place is known, in one piece on the drive, of a file of which nothing is
written here, at a place that does not go on where the handle has read before. What is in memory is answered on the spot; what
is not is read from the drive, those of a burst told to it together, past the page cache where that has less than half of it
(the kernel keeps the mount's own pages), but what was read so a short time before. All is checked as the short cut does, after
the bytes have come. Whatever is not as it should be (late, changed, a checksum, an error of the drive) is read the ordinary
way, which alone has errors.

PlainReading is what fuse/kernel/connection has of it, on its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.compiled import load_compiled
from nvpool.fuse.fast_path.remote_reads import FarReading
from nvpool.fuse.ops.eager_coroutine import WAITS, Step

_local_reads = load_compiled("nvpool.fuse.fast_path._local_reads")

BURST_MAX = 64
"""Requests taken, or answered, before everything else on the loop gets its turn."""

REAP_MAX = 4
"""Reads that came from the drive which are answered before what was asked for meanwhile is taken. All at once, and drive and
mount take turns: 16 readers of 4 KiB, cold, 39,000 reads a second, and 49,000 to 55,000 by fours; with those of 128 KiB by
fours 870 MiB/s, by twos 970."""
REAP_BYTES = 192 << 10
"""No further read than the one that reaches it."""

DRIVE_WAIT_S = 3.0
"""So long a mount that ends waits for reads that its drive does not answer."""


class PlainReading(FarReading):
    """`_plain` takes a READ that is in `_buffer`, where it can; None where that can not be here: no compiler, no io_uring, a
    processor without the instruction for checksums, a mount without the short cut."""

    _plain: Any = None
    _loop: asyncio.AbstractEventLoop
    _reading: bool
    _taking: bool
    _took: int
    _leaving: bool
    _some_ended: Callable[[], None]
    _take: Callable[[], None]

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        short_cut = self._ops.short_cut
        if _local_reads is None or not _local_reads.is_of_use() or short_cut is None or not short_cut.on:
            return
        try:
            self._plain = _local_reads.Reads(self, self._ops, short_cut)
        except OSError:  # no io_uring here
            return
        self._loop.add_reader(self._plain.fileno, self._reap)

    def _on_read(self, count: int) -> None:
        if self._plain is None or not self._plain.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst."""
        if self._plain is not None:
            self._plain.submit()
        super()._submit_plain_reads()

    @property
    def _plain_bytes(self) -> int:
        return super()._plain_bytes + (self._plain.read_bytes if self._plain is not None else 0)

    def _reap(self) -> None:
        """Answer what has come from the drive, and take what was asked for meanwhile: with several readers that is much. A few
        at a time: so the drive has the next ones of the first while the last are answered."""
        done = 0
        while done < BURST_MAX and (count := self._plain.reap(REAP_MAX, REAP_BYTES)):
            done += count
            self._some_ended()
            if self._work and self._reading and not self._taking:
                self._take()
                done += self._took

    async def _end_plain_reads(self) -> None:
        await super()._end_plain_reads()
        plain = self._plain
        if plain is None:
            return
        self._loop.remove_reader(plain.fileno)
        until_s = stopwatch_s() + DRIVE_WAIT_S
        while plain.waiting and not self._leaving and stopwatch_s() < until_s:
            plain.submit()
            plain.reap(BURST_MAX, REAP_BYTES)  # the kernel writes into their memory
            await asyncio.sleep(0.001)
        self.read_bytes += plain.read_bytes
        self._plain = None
        plain.close()

    # -- called by _plainreads -----------------------------------------------------------------------------------------

    def read_otherwise(self, unique: int, handle: int, offset: int, size: int) -> None:
        """A read that was begun there has to go the way of all others: soon, since a task may be running, in which a step can
        not begin."""
        self._loop.call_soon(self._read_otherwise, unique, handle, offset, size)

    def _read_otherwise(self, unique: int, handle: int, offset: int, size: int) -> None:
        if unique not in self._work:  # it was cancelled
            return
        step = Step(self._loop)
        step.on_end = partial(self._step_ended, unique, "read", self._data)
        self._work[unique] = step, *self._work[unique][1:]
        try:
            found = step.begin(self._ops.read(handle, offset, size))
        except Exception as error:
            step.on_end(None, error)
        else:
            if found is not WAITS:
                step.on_end(found, None)
