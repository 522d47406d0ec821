"""Fast path for reads from stores: one compiled step from the request to the store's frame, and one back.

Over a connection a random read is a message of its own here, with the next number of the connection and in
its table, as any other: deadlines, lost connections and refusals apply to it. The reads of a burst are sent
together, but a read whose store is idle is sent immediately. Replies that arrive together are checked and
passed on a few at a time, and requests that arrive meanwhile are taken in between. Used if the compiled
module was built (`_remote_reads`). The reference implementation is the slow path of every request
(fuse/dispatch to client/data/chunk_client), which batches reads in messages and gives the same results.

The fast path covers up to 128 KiB of one chunk whose store is known and connected (frames over TCP or a unix
socket), without short-circuit reads; in a file above SMALL_BYTES with no data written here; at an offset that
does not continue where the handle has read before. The store is the one that the slow path would choose among
the replicas. It also needs a reply with all of the blocks and their checksums, in the connection's buffer,
which is wide while more than 64 KiB are requested, or outside that buffer. Any other outcome (an error, a
hole, a block that does not fit, a connection that ends) is passed to the slow path as the reply, with the
read's original deadline. A read that Hedging finds slow continues on the slow path, which asks another
replica too.

RemoteReadPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.client.data.read_queue import Read
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.futures import BlocksFuture
from nvpool.fuse.fast_path.read_fallback import ReadFallback
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

_remote_reads = load_compiled("nvpool.fuse.fast_path._remote_reads")


class RemoteReadPath:
    """Has `compiled`, which takes a READ in the buffer if it can.

    `compiled` is None without the compiled module, on a processor without the instruction for checksums, and
    if the layer below queries no stores. `take_requests` reads and answers the requests that wait.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        fallback: ReadFallback,
        some_ended: Callable[[], None],
        take_requests: Callable[[], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self._fallback = fallback
        self.compiled: Any = None
        # called by the compiled module, with `as_ordinary`
        self.read_ended = fallback.read_ended
        self.answer_refused = replies.answer_refused
        self.some_ended = some_ended
        self.take_requests = take_requests

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        chunks = self._ops.chunks
        if _remote_reads is not None and _remote_reads.is_of_use() and chunks is not None:
            self.compiled = _remote_reads.RemoteReads(self, self._ops, chunks, IN_WORK_MAX)

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

    def as_ordinary(
        self, unique: int, file, index: int, within: int, span: int, skip: int, size: int, deadline_s: float
    ) -> Read:
        """Let the slow path continue with a read that was sent, as if that had sent the request."""
        coming = BlocksFuture(skip, size)
        self._fallback.wait_for(coming, unique)
        return Read(file, index, within, span, None, coming, deadline_s)
