"""Fast path for small files that are read completely: one compiled step in each direction.

From the kernel's requests to one message for a store, and from its reply to the kernel's. A program that
reads many small files opens each, reads it once and closes it. Such reads are batched in the same messages,
as all reads of a burst are (client/data/chunk_client). But between the kernel and the message there is only
one Python object per read, and the bytes go from the store's reply to the kernel and to the cache
(client/state/small_file_cache). Used if the compiled module was built (`_small_files`); the reference
implementation is the slow path of every request (fuse/dispatch to client/read/reader), which gives the same
results.

The fast path covers a read of a file of up to SMALL_BYTES that is neither cached nor being fetched, with no
data written here, whose size is known, whose store is known and connected (frames over TCP or a unix socket),
and of which short-circuit reads have read nothing. The store is the one that the slow path would choose among
the replicas. It also needs a reply with all requested bytes and their checksums. Any other outcome (an error,
a hole, a block that does not fit, a connection that ends) is passed to the slow path as the reply, for all
reads of the message. A message that Hedging finds slow continues on the slow path, which asks another replica
too. As with reader.WholeFileFetch, several readers may wait for the same bytes.

SmallFileReadPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.client.data.read_queue import Read
from nvpool.client.read.reader import SmallFilePart
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.read_fallback import ReadFallback
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

_small_files = load_compiled("nvpool.fuse.fast_path._small_files")


class SmallFileReadPath:
    """Has `compiled`, which takes a READ in the buffer if it can.

    `compiled` is None without the compiled module, on a processor without the instruction for checksums, if
    the layer below queries no stores, and if no file is to be read completely.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        fallback: ReadFallback,
        some_ended: Callable[[], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self._fallback = fallback
        self.compiled: Any = None
        # called by the compiled module, with `small_reads_go_on` and `as_ordinary`
        self.read_ended = fallback.read_ended
        self.read_otherwise = fallback.read_otherwise
        self.answer_refused = replies.answer_refused
        self.some_ended = some_ended

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        below = self._ops.knows_by
        if (
            _small_files is not None
            and _small_files.is_of_use()
            and below is not None
            and below.options.small_bytes
        ):
            self.compiled = _small_files.SmallFileReads(self, self._ops, below, IN_WORK_MAX)

    @property
    def read_bytes(self) -> int:
        """Bytes read since `start`; 0 after `stop`, which counts them in the state."""
        return self.compiled.read_bytes if self.compiled is not None else 0

    def stop(self) -> None:
        """Send what is collected. Replies that arrive later go to the slow path."""
        compiled, self.compiled = self.compiled, None
        if compiled is not None:
            self.requests.read_bytes += compiled.read_bytes
            compiled.close()

    def small_reads_go_on(self, lane, asked: list) -> None:
        """Continue, on the slow path, reads that cannot be sent by the compiled module after all."""
        reads = self.as_ordinary(asked)
        try:
            self._ops.chunks.send(lane, reads)
        except Exception as error:  # a bug: report it to those that wait
            for read in reads:
                if not read.future.done():
                    read.future.set_exception(error)

    def as_ordinary(self, asked: list) -> list[Read]:
        """Let the slow path continue with reads that were sent, as if that had sent the request."""
        return [self._as_ordinary(one) for one in asked]

    def _as_ordinary(self, one) -> Read:
        below = self._ops.knows_by
        parts = one.parts
        if not one.is_done:
            part = SmallFilePart(one.offset, one.finish)
            part.then = below.unreported_check(one.opened, one.offset, one.size)
            self._fallback.wait_for(part, one.unique)
            parts = [part, *parts]
        return below.reader.go_on_with(one, parts)
