"""Small files that are read as a whole in one compiled step each way: from the kernel's requests to one message for a store,
and from its answer to the kernel's.

Who reads many small files opens each, reads it once and closes it. Such reads travel together, as all reads of a burst do
(client/data/chunk_client), in the same messages; but between the kernel and the message there are no Python objects but one for
a read, and its bytes go from the answer to the kernel and to what is kept (client/state/small_file_cache). Where a compiler was
(`_smallreads`); its twin is the way of every request (kernel_requests to client/read/reader), which says the same.

Only plain sailing: a read of a file of up to SMALL_BYTES that is neither here nor on its way, and of which nothing is written
here, whose end is known, with one replica whose store is known and connected (frames over TCP or a unix socket); by the short
cut nothing was read of it. And an answer with all bytes of all that it was asked for, and their checksums. All else that comes
of it (an error, a hole, a block that does not fit, a connection that ends) goes to the ordinary way as its answer, for all of
the message's reads. As with reader.Whole others may wait for the same bytes.

SmallReading is what fuse/kernel/connection has of it, on its loop, above fuse/fast_path/local_reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.client.data.target_queue import Read
from nvpool.client.read.reader import Part
from nvpool.core.compiled import load_compiled
from nvpool.fuse.fast_path.local_reads import PlainReading

_small_files = load_compiled("nvpool.fuse.fast_path._small_files")


class SmallReading(PlainReading):
    """`_small` takes a READ that is in `_buffer`, where it can; None where that can not be here: no compiler, a processor
    without the instruction for checksums, nothing below that asks stores, nothing that is to be read as a whole."""

    _small: Any = None
    _work: dict
    in_work_max: int
    _step_ended: Callable[..., None]

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        below = self._ops.knows_by
        if _small_files is not None and _small_files.is_of_use() and below is not None and below.options.small_bytes:
            self._small = _small_files.Reads(self, self._ops, below, self.in_work_max)

    def _on_read(self, count: int) -> None:
        if self._small is None or not self._small.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst."""
        if self._small is not None:
            self._small.send()
        super()._submit_plain_reads()

    @property
    def _plain_bytes(self) -> int:
        return super()._plain_bytes + (self._small.read_bytes if self._small is not None else 0)

    async def _end_plain_reads(self) -> None:
        small, self._small = self._small, None
        if small is not None:
            self.read_bytes += small.read_bytes
            small.close()
        await super()._end_plain_reads()

    # -- called by _smallreads -----------------------------------------------------------------------------------------

    def small_reads_go_on(self, lane, asked: list) -> None:
        """Reads that can not be sent there after all are, as if the ordinary way had begun them."""
        reads = [self._as_ordinary(one) for one in asked]
        try:
            self._ops.chunks.send(lane, reads)
        except Exception as error:  # a bug: who waits is told
            for read in reads:
                if not read.future.done():
                    read.future.set_exception(error)

    def small_reads_answered(self, lane, asked: list, reply, error: BaseException | None) -> None:
        """What came of reads that a store was asked for goes the way of all others: as if that had asked."""
        self._ops.chunks.answered(lane, [self._as_ordinary(one) for one in asked], reply, error)

    def _as_ordinary(self, one) -> Read:
        below = self._ops.knows_by
        parts = one.parts
        if not one.told:
            part = Part(one.offset, one.finish)
            part.then = below.if_told(one.opened, one.offset, one.size)
            part.on_end = partial(self._step_ended, one.unique, "read", self._data)
            self._work[one.unique] = part, *self._work[one.unique][1:]
            parts = [part, *parts]
        return below.reader.go_on_with(one, parts)
