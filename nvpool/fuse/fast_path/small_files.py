"""Fast path for small files that are read completely: one compiled step in each direction.

From the kernel's requests to one message for a store, and from its reply to the kernel's. A program that
reads many small files opens each, reads it once and closes it. Such reads are batched in the same messages,
as all reads of a burst are (client/data/chunk_client). But between the kernel and the message there is only
one Python object per read, and the bytes go from the store's reply to the kernel and to the cache
(client/state/small_file_cache). Used if the compiled module was built (`_small_files`); the reference
implementation is the slow path of every request (fuse/dispatch to client/read/reader), which gives the same
results.

The fast path covers a read of a file of up to SMALL_BYTES that is neither cached nor being fetched, with no
data written here, whose size is known, with one replica whose store is known and connected (frames over TCP
or a unix socket), and of which short-circuit reads have read nothing. It also needs a reply with all
requested bytes and their checksums. Any other outcome (an error, a hole, a block that does not fit, a
connection that ends) is passed to the slow path as the reply, for all reads of the message. As with
reader.WholeFileFetch, several readers may wait for the same bytes.

SmallFileReadPath is the part of fuse/kernel/connection that uses this, on its loop, above
fuse/fast_path/local_reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.client.data.read_queue import Read
from nvpool.client.read.reader import SmallFilePart
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.local_reads import LocalReadPath

_small_files = load_compiled("nvpool.fuse.fast_path._small_files")


class SmallFileReadPath(LocalReadPath):
    """Adds `_small`, which takes a READ in `_buffer` if it can.

    `_small` is None without the compiled module, on a processor without the instruction for checksums, if the
    layer below queries no stores, and if no file is to be read completely.
    """

    _small: Any = None
    _work: dict
    in_work_max: int
    _step_ended: Callable[..., None]

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        below = self._ops.knows_by
        if (
            _small_files is not None
            and _small_files.is_of_use()
            and below is not None
            and below.options.small_bytes
        ):
            self._small = _small_files.SmallFileReads(self, self._ops, below, self.in_work_max)

    def _on_read(self, count: int) -> None:
        if self._small is None or not self._small.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """Submit the collected reads, at the end of a burst."""
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

    # -- called by _small_files ----------------------------------------------------------------------------------------

    def small_reads_go_on(self, lane, asked: list) -> None:
        """Continue, on the slow path, reads that cannot be sent there after all."""
        reads = [self._as_ordinary(one) for one in asked]
        try:
            self._ops.chunks.send(lane, reads)
        except Exception as error:  # a bug: report it to those that wait
            for read in reads:
                if not read.future.done():
                    read.future.set_exception(error)

    def small_reads_answered(self, lane, asked: list, reply, error: BaseException | None) -> None:
        """Pass a store's reply, or an error, to the slow path, as if that had sent the request."""
        self._ops.chunks.answered(lane, [self._as_ordinary(one) for one in asked], reply, error)

    def _as_ordinary(self, one) -> Read:
        below = self._ops.knows_by
        parts = one.parts
        if not one.is_done:
            part = SmallFilePart(one.offset, one.finish)
            part.then = below.unreported_check(one.opened, one.offset, one.size)
            part.on_end = partial(self._step_ended, one.unique, "read", self._data)
            self._work[one.unique] = part, *self._work[one.unique][1:]
            parts = [part, *parts]
        return below.reader.go_on_with(one, parts)
