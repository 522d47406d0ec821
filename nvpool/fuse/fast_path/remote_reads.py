"""Fast path for reads from stores: one compiled step from the request to the store's frame, and one back.

Over a connection a random read is a message of its own here, with the next number of the connection and in
its table, as any other: deadlines, lost connections and refusals apply to it. The reads of a burst are sent
together, but a read whose store is idle is sent immediately. Replies that arrive together are checked and
passed on a few at a time, and requests that arrive meanwhile are taken in between. Used if the compiled
module was built (`_remote_reads`). The reference implementation is the slow path of every request
(fuse/dispatch to client/data/chunk_client), which batches reads in messages and gives the same results.

The fast path covers up to 128 KiB of one chunk with one replica whose store is known and connected (frames
over TCP or a unix socket), without short-circuit reads; in a file above SMALL_BYTES with no data written
here; at an offset that does not continue where the handle has read before. It also needs a reply with all of
the blocks and their checksums, in the connection's buffer, which is wide while more than 64 KiB are
requested, or outside that buffer. Any other outcome (an error, a hole, a block that does not fit, a
connection that ends) is passed to the slow path as the reply, with the read's original deadline.

RemoteReadPath is the part of fuse/kernel/connection that uses this, on its loop, below
fuse/fast_path/local_reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.client.data.read_queue import Read
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.futures import BlocksFuture
from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.protocol import replies

_remote_reads = load_compiled("nvpool.fuse.fast_path._remote_reads")


class RemoteReadPath(KernelRequests):
    """Adds `_far`, which takes a READ in `_buffer` if it can.

    `_far` is None without the compiled module, on a processor without the instruction for checksums, and if
    the layer below queries no stores.
    """

    _far: Any = None
    _work: dict
    _buffers: tuple
    in_work_max: int
    _step_ended: Callable[..., None]

    def _begin_plain_reads(self) -> None:
        chunks = self._ops.chunks
        if _remote_reads is not None and _remote_reads.is_of_use() and chunks is not None:
            self._far = _remote_reads.RemoteReads(self, self._ops, chunks, self.in_work_max)

    def _following(self, most: int) -> tuple[int, int]:
        """Read the next request into `_buffer`.

        Returns its length, -1 if none waits; and how many requests before it were handled where they were
        read, at most `most`. If the length is 0, there may be more. Raises OSError.
        """
        try:
            return os.readv(self._fd, self._buffers), 0
        except BlockingIOError:
            return -1, 0

    def _on_read(self, count: int) -> None:
        if self._far is None or not self._far.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """Submit the collected reads, at the end of a burst."""
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
        """Reply with an error to a read that was started there."""
        self._step_ended(unique, "read", self._data, None, error)

    def answer_refused(self, unique: int, code: int, length: int) -> None:
        """Handle a reply that the kernel has refused."""
        self._not_taken(OSError(code, os.strerror(code)), [replies.HEADER.pack(length, 0, unique)])

    def read_answered(
        self,
        unique: int,
        lane,
        file,
        index: int,
        within: int,
        span: int,
        skip: int,
        size: int,
        deadline_s: float,
        reply,
        error: BaseException | None,
    ) -> None:
        """Pass a store's reply, or an error, to the slow path, as if that had sent the request."""
        coming = BlocksFuture(skip, size)
        coming.on_end = partial(self._step_ended, unique, "read", self._data)
        self._work[unique] = coming, *self._work[unique][1:]
        self._ops.chunks.answered(
            lane, [Read(file, index, within, span, None, coming, deadline_s)], reply, error
        )
