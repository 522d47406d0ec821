"""The commonest reads of what a store has in one compiled step each way: from the kernel's request to the store's frame, and
from the frame of the answer to the kernel's.

Over a connection a read at random is a message of its own then, with the next number of the connection and in its table, as any
other: deadlines, lost connections and refusals know it. Those of a burst leave together, but one whose store has nothing to do
at once; those that come together are checked and answered a few at a time, and what was asked for meanwhile is taken in
between. Where a compiler was (`_farreads`); its twin is the way of every request (kernel_requests to client/data/chunk_client),
which gathers them in messages, and says the same.

Only plain sailing: up to 128 KiB of one chunk with one replica whose store is known and connected (frames over TCP or a unix
socket), with no short cut to it, of a file above SMALL_BYTES of which nothing is written here, at a place that does not go on
where the handle has read before; and an answer with all of the blocks and their checksums, in the connection's buffer, which is
wide while more than 64 KiB are asked for, or elsewhere as always. All else that comes of such a read (an error, a hole,
a block that does not fit, a connection that ends) goes to the ordinary way as its answer, with the deadline that the read has
had.

FarReading is what fuse/kernel/connection has of it, on its loop, below fuse/fast_path/local_reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.client.data.target_queue import Read
from nvpool.core.compiled import load_compiled
from nvpool.core.futures import Coming
from nvpool.fuse.kernel.dispatch import KernelRequests
from nvpool.fuse.protocol import replies

_remote_reads = load_compiled("nvpool.fuse.fast_path._remote_reads")


class FarReading(KernelRequests):
    """`_far` takes a READ that is in `_buffer`, where it can; None where that can not be here: no compiler, a processor without
    the instruction for checksums, nothing below that asks stores."""

    _far: Any = None
    _work: dict
    _buffers: tuple
    in_work_max: int
    _step_ended: Callable[..., None]

    def _begin_plain_reads(self) -> None:
        chunks = self._ops.chunks
        if _remote_reads is not None and _remote_reads.is_of_use() and chunks is not None:
            self._far = _remote_reads.Reads(self, self._ops, chunks, self.in_work_max)

    def _following(self, most: int) -> tuple[int, int]:
        """The length of the next request, which is in `_buffer`, -1 where none waits; and how many before it were begun where
        they were read, at most so many: then 0, and there may be more. OSError."""
        try:
            return os.readv(self._fd, self._buffers), 0
        except BlockingIOError:
            return -1, 0

    def _on_read(self, count: int) -> None:
        if self._far is None or not self._far.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst."""
        if self._far is not None:
            self._far.send()

    @property
    def _plain_bytes(self) -> int:
        return self._far.read_bytes if self._far is not None else 0

    async def _end_plain_reads(self) -> None:
        far, self._far = self._far, None
        if far is not None:
            self.read_bytes += far.read_bytes
            far.close()

    # -- called by the compiled modules --------------------------------------------------------------------------------

    def read_ended(self, unique: int, error: BaseException) -> None:
        """A read that was begun there has failed."""
        self._step_ended(unique, "read", self._data, None, error)

    def answer_refused(self, unique: int, code: int, length: int) -> None:
        """The kernel does not take what a read has brought."""
        self._not_taken(OSError(code, os.strerror(code)), [replies.HEADER.pack(length, 0, unique)])

    def read_answered(self, unique: int, lane, file, index: int, within: int, span: int, skip: int, size: int,
                      deadline_s: float, reply, error: BaseException | None) -> None:
        """What came of a read that a store was asked for goes the way of all others: as if that had asked."""
        coming = Coming(skip, size)
        coming.on_end = partial(self._step_ended, unique, "read", self._data)
        self._work[unique] = coming, *self._work[unique][1:]
        self._ops.chunks.answered(lane, [Read(file, index, within, span, None, coming, deadline_s)], reply, error)
